"""A stage of a Spark pipeline that trains on a parameter server: columns of words, hashed, and FTRL.

Needs `pip install dps[spark]` and Java 17 or newer: python examples/spark_pipeline.py
"""

from pyspark.ml import Pipeline
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import FeatureHasher
from pyspark.sql import SparkSession, functions

from dps.models.spark import SparkLogisticRegression

ROWS = 20_000


def clicks(spark: SparkSession):
    """Sites with an even number are liked; advertisements that end in 7 are liked more."""
    frame = spark.range(ROWS).select(
        functions.floor(functions.rand(1) * 300).alias("s"), functions.floor(functions.rand(2) * 100).alias("a")
    )
    odds = functions.when(frame.s % 2 == 0, 1.0).otherwise(-1.0) + functions.when(frame.a % 10 == 7, 2.0).otherwise(0.0)
    return frame.select(
        functions.concat(functions.lit("site-"), "s").alias("site"),
        functions.concat(functions.lit("ad-"), "a").alias("advert"),
        (functions.rand(3) < 1 / (1 + functions.exp(-odds))).cast("double").alias("label"),
    )


def main() -> None:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    train, test = clicks(spark).cache().randomSplit([0.8, 0.2], seed=0)
    hasher = FeatureHasher(inputCols=["site", "advert"], outputCol="features", numFeatures=1 << 18)
    learner = SparkLogisticRegression(solver="ftrl", stepSize=0.3, regParam=0.1, elasticNetParam=1.0, maxIter=3)
    model = Pipeline(stages=[hasher, learner]).fit(train)  # servers start beside Spark's driver, and end
    area = BinaryClassificationEvaluator().evaluate(model.transform(test))
    print(f"area under the curve {area:.4f}, {model.stages[-1].coefficients.numNonzeros()} weights are not zero")
    spark.stop()


if __name__ == "__main__":
    main()
