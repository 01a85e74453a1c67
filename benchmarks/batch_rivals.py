"""Spark MLlib and dask-glm: how long until a loss, beside dps.

Each rival's solver runs on data it can manage; what it has reached then, dps has to reach from nothing.
"""
def compare(report, ps, client, quick): report.note("no")
