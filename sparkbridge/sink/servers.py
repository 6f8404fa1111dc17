"""Whether the sink's brokers can be reached, told by the driver before the job.

A task would try for as long, and Spark would run it four times.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Final

from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import ConnectionFailedError
from sparkbridge.options import SinkOptions
from sparkbridge.sink.commit import driver_config, started

#: What Spark runs in the driver's process that makes writers for tasks. Commits come from another process,
#: and have patience of their own with brokers that restart.
PLANNING_MODULE: Final = "pyspark.sql.worker.write_into_data_source"
#: So long a job of its own tries. Others may be batches of a stream that runs, whose brokers may restart.
JOB_PATIENCE_MS: Final = 10_000

_reached: set[str] = set()


def check_servers(options: SinkOptions, *, is_stream: bool) -> None:
    """In the process that plans, once: raises ConnectionFailedError when no broker can be reached.

    Tried for kafka.request.timeout.ms; by a batch job without a name for JOB_PATIENCE_MS at most. Spark makes
    a writer for every micro-batch: those after the first ask nobody.
    """
    servers = options.client.bootstrap_servers
    if PLANNING_MODULE not in sys.modules or servers in _reached:
        return
    timeout_ms = options.client.request_timeout_ms
    if not is_stream and options.txn_app_id is None and options.sink_name is None:
        timeout_ms = min(timeout_ms, JOB_PATIENCE_MS)
    try:
        with closing(started(lambda: Admin(config=driver_config(options, timeout_ms)), timeout_ms)):
            _reached.add(servers)
    except ConnectionFailedError as error:
        raise ConnectionFailedError(
            f"the sink's brokers were not reached within {timeout_ms / 1000:g} s, kafka.bootstrap.servers is "
            f"{servers!r}: {error.message}",
            hint="see that the option names a broker's host and port, and that the driver can reach it",
        ) from error
