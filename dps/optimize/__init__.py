"""Solvers, written once for numpy arrays and for vectors on parameter servers.

Needs scipy: ``pip install dps[models]``.

=================== ==================================================================================
vectors             the two operations that are worth a form of their own: many dots, a linear combination
minimization        what all solvers share: checked input, counts, when to end, the result
line_search         steps that satisfy the strong Wolfe conditions
pairs               the pairs of L-BFGS, in its vector-free form
quasi_newton        L-BFGS
orthants            OWL-QN: L-BFGS with an L1 penalty
conjugate_gradients nonlinear conjugate gradients, and linear ones for symmetric systems
descent             gradient descent
proximal_gradients  FISTA: accelerated proximal gradients
consensus           consensus ADMM
parts               its parts, in this process or in Dask tasks
mini_batches        gradient descent on mini-batches, as Spark's MLlib does it
objective           a loss over data on trainers, and `minimize`
=================== ==================================================================================
"""

from dps.errors import needing

with needing("models"):
    from dps.optimize.conjugate_gradients import conjugate_gradient, linear_conjugate_gradient
    from dps.optimize.consensus import admm
    from dps.optimize.descent import gradient_descent
    from dps.optimize.mini_batches import mini_batch_gradient_descent
    from dps.optimize.objective import Objective, minimize
    from dps.optimize.orthants import owlqn
    from dps.optimize.proximal_gradients import fista
    from dps.optimize.quasi_newton import lbfgs
    from dps.optimize.vectors import combine, dots

__all__ = [
    "Objective",
    "admm",
    "combine",
    "conjugate_gradient",
    "dots",
    "fista",
    "gradient_descent",
    "lbfgs",
    "linear_conjugate_gradient",
    "mini_batch_gradient_descent",
    "minimize",
    "owlqn",
]
