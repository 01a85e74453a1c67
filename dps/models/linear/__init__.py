"""Linear models: logistic regression, regressions, a support vector machine."""
