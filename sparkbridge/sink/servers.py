"""Checks in the driver, before the job starts, whether the sink's brokers can be reached.

Without this check, each task would wait for the timeout, and Spark would run each task four times.
"""

# Tests: tests/sparkbridge/test_sink_servers.py

from __future__ import annotations

import sys
from contextlib import closing
from typing import Final

from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import AuthenticationError, ConnectionFailedError
from sparkbridge.options import ClientOptions, SinkOptions
from sparkbridge.sink.commit import driver_config, started

#: The module of the process in which Spark creates writers for tasks. Commits run in another process and wait
#: longer for brokers that restart.
PLANNING_MODULE: Final = "pyspark.sql.worker.write_into_data_source"
#: The timeout in milliseconds for a job that is not part of a stream. Other jobs may be batches of a running
#: stream, whose brokers may restart.
JOB_PATIENCE_MS: Final = 10_000

_reached: set[ClientOptions] = set()


def check_servers(options: SinkOptions, *, is_stream: bool) -> None:
    """Raise ConnectionFailedError if no broker can be reached within the timeout.

    Raises AuthenticationError at once if TLS or the login fails. The timeout is kafka.request.timeout.ms, but
    at most JOB_PATIENCE_MS for a batch job with neither sinkName nor txnAppId. Does nothing in a process
    other than that of PLANNING_MODULE, or if a check with the same settings succeeded before in this process:
    Spark creates a writer for every micro-batch.
    """
    if PLANNING_MODULE not in sys.modules or options.client in _reached:
        return
    timeout_ms = options.client.request_timeout_ms
    if not is_stream and options.txn_app_id is None and options.sink_name is None:
        timeout_ms = min(timeout_ms, JOB_PATIENCE_MS)
    try:
        with closing(started(lambda: Admin(config=driver_config(options, timeout_ms)), timeout_ms)):
            _reached.add(options.client)
    except AuthenticationError:
        raise
    except ConnectionFailedError as error:
        raise ConnectionFailedError(
            f"the sink's brokers were not reached within {timeout_ms / 1000:g} s, kafka.bootstrap.servers is "
            f"{options.client.bootstrap_servers!r}: {error.message}",
            hint="check that the option names a broker's host and port, and that the driver can reach it",
        ) from error
