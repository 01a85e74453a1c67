"""Models with a vector of few numbers for each feature, user or item: factorization machines, matrix factorization."""
