"""dps on YARN: the specification of an application, and the cluster."""

from dps.engine.deploy.yarn import YarnCluster
from dps.engine.deploy.yarn_specification import specification

__all__ = ["YarnCluster", "specification"]
