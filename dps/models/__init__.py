"""scikit-learn estimators that train on a parameter server. Written on the public client API only.

Needs scikit-learn, scipy and pandas: ``pip install dps[models]``.
"""

from dps.models.encoding import encode_frame, read_libsvm
from dps.models.logistic import LogisticRegression

__all__ = ["LogisticRegression", "encode_frame", "read_libsvm"]
