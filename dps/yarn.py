"""dps on YARN: the specification of an application, and the cluster."""

from dps.deploy.yarn import YarnCluster
from dps.deploy.yarn_specification import specification

__all__ = ["YarnCluster", "specification"]
