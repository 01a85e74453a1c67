"""``dask ps``: parameter servers from the shell. Dask's command line loads this group (entry point ``dask_cli``).

``common.py`` has what all commands share: the options that name the cluster, the printing of answers and of errors. The
other files have the commands.
"""

from __future__ import annotations

import click
from dask.cli import CONTEXT_SETTINGS

from dps.engine.cli import servers, tables, top, train

__all__ = ["ps"]


@click.group(context_settings=CONTEXT_SETTINGS)
def ps() -> None:
    """Parameter servers (dps) in a Dask cluster.

    The cluster is named with --scheduler, or as for all of Dask: by DASK_SCHEDULER_ADDRESS, or by the key
    scheduler-address of Dask's configuration.

    Exit status: 0; 1 for a failure, with one line that says why; 2 for a wrong command line.
    """


for command in (*servers.COMMANDS, *tables.COMMANDS, top.top, train.train):
    ps.add_command(command)
