"""`ps.run` and `ps.resume_run`, once their options are checked: on workers of Dask or Spark, to the end of the run."""

from __future__ import annotations

import contextlib
import functools

from dps.engine.driver.connection import DeferredConnection, DriverConnection
from dps.engine.training import data as user_data
from dps.engine.training import spark
from dps.engine.training.data import Partitions, in_memory, is_spark
from dps.engine.training.launch import RunOptions, launch
from dps.engine.training.types import Columns, Data, Function, Result
from dps.engine.wire.messages import SavedRun
from dps.errors import DPSError, InputError

__all__ = ["train"]


def train(
    connection: DriverConnection | DeferredConnection,
    function: Function,
    data: Data,
    options: RunOptions,
    columns: Columns | None,
    interrupted: SavedRun | None = None,
) -> list[Result]:
    """Train in a new run, or go on with one that was restored, or with one that was `interrupted`; and settle it at its
    end.

    Trainers that are tasks of Dask end with their scheduler. So what this driver asks of the controller names its term:
    another controller refuses that, because another driver may resume the run there. Trainers on Spark wait for another
    controller, and so does their driver.
    """
    client, ticket, description = connection.dask_client, connection.ticket, connection.describe()
    restored = interrupted or description.restored
    of_servers = {server.worker for server in description.servers}
    on_spark = is_spark(data)
    call = connection.call if on_spark else functools.partial(connection.call, term=description.term)
    asking = connection.call_patiently if on_spark else connection.call
    if columns is not None and on_spark:
        data = spark.chosen(data, columns)
    elif columns is not None:
        data = user_data.chosen(client, data, columns, of_servers)
    if on_spark and options.grows:
        raise InputError(
            'trainers="all" is for Dask data: the tasks of a barrier stage of Spark begin and end together, so none '
            "can come later; say how many, or leave it out"
        )
    try:
        if on_spark:
            results = spark.launch(ticket, call, asking, function, data, options, restored)
        else:
            if in_memory(data):
                going_on = restored if options.resume else None
                parts = Partitions.sent(client, data, of_servers, options.count, going_on)
            else:
                parts = Partitions.of(client, data)
            results = launch(client, ticket, call, function, parts, options, restored, description.term)
    except BaseException:
        if options.run is None:
            with contextlib.suppress(DPSError):  # the run's own error counts
                call("settle", keep=False)
        raise
    if options.run is None:
        asking("settle", keep=True)
    return results
