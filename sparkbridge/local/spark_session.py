"""Creates Spark sessions with the settings that suit this source and sink.

::

    from sparkbridge import session

    spark = session("orders")                                    # this machine, all cores
    spark = session("orders", master="spark://master:7077")      # a cluster

A session of ``SparkSession.builder`` works as well: ``recommended_settings`` returns the settings to add.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from sparkbridge.errors import SparkStartError
from sparkbridge.local import fast_start
from sparkbridge.option_values import option_text

LOCAL_ADDRESS: Final = "127.0.0.1"
MIN_PYSPARK: Final = (4, 2)
_LOCAL = re.compile(r"local(\[(?P<cores>\d+|\*)(,\s*\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[(?P<cores>.*)\]")
_CHECKPOINT_MANAGER: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
#: The variables that Spark adds to the environment of a data source in Python when a stream of it starts.
STREAM_VARIABLES: Final = (
    "SPARK_LOCAL_DIRS",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_PYTHON_RUNTIME",
)


def is_local(master: str) -> bool:
    """Whether, with this master URL, the driver and all executors run on this machine."""
    return bool(_LOCAL.fullmatch(master) or _LOCAL_CLUSTER.fullmatch(master))


def missing_requirements() -> list[str]:
    """Return the unmet requirements of Spark, one sentence with advice for each; [] if all are met."""
    missing: list[str] = []
    for package, least in (("pyspark", MIN_PYSPARK), ("pyarrow", (18,))):
        wanted = ".".join(map(str, least))
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(f"{package} is not installed: {_how_to_install()}")
            continue
        if tuple(int(part) for part in re.findall(r"\d+", found)[: len(least)]) < least:
            missing.append(f"{package} {found} is too old, {wanted} is needed: pip install -U {package}")
    java = fast_start.find_java()
    need = f"Java {fast_start.MIN_JAVA} or newer is needed"
    how = "install one (Debian and Ubuntu: apt install openjdk-17-jre-headless), or set JAVA_HOME"
    if java is None:
        home = os.environ.get("JAVA_HOME")
        where = f" in JAVA_HOME, {home}" if home else ""
        missing.append(f"no working java was found{where}; {need}: {how}")
    elif java.major < fast_start.MIN_JAVA:
        missing.append(f"{java.command} is Java {java.major}; {need}: {how}")
    return missing


def _how_to_install() -> str:
    in_checkout = Path(__file__).resolve().parents[2] / "bin" / "setup"
    return "bin/setup" if in_checkout.is_file() else 'pip install "kafkalite[spark]"'


def recommended_settings(
    master: str, *, cache: str | os.PathLike[str] | None = None, is_short_lived: bool = False
) -> dict[str, str]:
    """Return the recommended Spark settings by name, including ``spark.master``.

    For local masters, the settings also disable the web interface, bind to LOCAL_ADDRESS, set as many shuffle
    partitions as cores, and select a manager of checkpoint files that is faster on a local disk. For them,
    ``is_short_lived`` (for tests and short jobs) makes the start faster and long jobs slower, and ``cache``
    is the cache directory of ``fast_start``.
    """
    settings = {
        "spark.master": master,
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
    }
    if not is_local(master):
        return settings
    options = fast_start.java_options(fast_start.class_archive(cache), is_short_lived=is_short_lived)
    return settings | {
        "spark.ui.enabled": "false",
        "spark.driver.host": LOCAL_ADDRESS,
        "spark.driver.bindAddress": LOCAL_ADDRESS,
        "spark.driver.extraJavaOptions": options,
        "spark.executor.extraJavaOptions": options,
        "spark.sql.shuffle.partitions": str(_cores(master)),
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_MANAGER,
    }


def _cores(master: str) -> int:
    """Return the number of cores of a local master, or of all workers of a local cluster."""
    if cluster := _LOCAL_CLUSTER.fullmatch(master):
        workers, each, *_ = (int(number) for number in cluster["cores"].split(","))
        return workers * each
    local = _LOCAL.fullmatch(master)
    cores = local["cores"] if local is not None else None
    if cores == "*":
        return os.cpu_count() or 1
    return int(cores or 1)


@contextlib.contextmanager
def launch_environment(master: str, cache: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Set the environment for a new JVM and restore it afterwards. Variables that were set before stay."""
    wanted = {"PYSPARK_DRIVER_PYTHON": sys.executable}
    if is_local(master):
        wanted |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": LOCAL_ADDRESS}
        home: Path | None = fast_start.shadow_home(cache)
        if home is not None:
            wanted["SPARK_HOME"] = str(home)
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def session(
    app_name: str = "kafkalite",
    *,
    master: str | None = None,
    settings: Mapping[str, object] | None = None,
    cache: str | os.PathLike[str] | None = None,
    is_short_lived: bool = False,
) -> Any:
    """Return the running SparkSession, or a new one. ``settings`` override the recommended settings.

    The session becomes the active one of the calling thread. Each other thread that writes must first call
    this or ``activate``. ``master`` is ``local[*]`` unless it is given here, in ``settings``, to spark-submit
    or as MASTER in the environment. Settings of spark-submit override the recommended ones. In ``settings``,
    booleans become ``true`` and ``false``, and extraJavaOptions are appended to the recommended ones.
    ``cache`` is passed to ``fast_start``. Raises SparkStartError if the session cannot be started and a
    requirement is not met (see ``missing_requirements``).
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        hint = "; ".join(missing_requirements()) or f"pyspark is not installed: {_how_to_install()}"
        raise SparkStartError("Spark can't start here", hint=hint) from None

    given = {name: option_text(value) for name, value in (settings or {}).items()}
    submitted = _submitted_settings()
    chosen = master or given.get("spark.master") or submitted.get("spark.master")
    chosen = chosen or os.environ.get("MASTER") or "local[*]"
    wanted = recommended_settings(chosen, cache=cache, is_short_lived=is_short_lived)
    wanted |= {name: value for name, value in submitted.items() if name in wanted and name != "spark.master"}
    for name, value in given.items():
        if name == "spark.master":
            continue  # ``chosen`` counts, for which the other settings were made
        if name.endswith(".extraJavaOptions") and name in wanted:
            value = f"{wanted[name]} {value}"
        wanted[name] = value
    with launch_environment(chosen, cache):
        if is_local(chosen):
            wanted = _quiet_workers(cache) | wanted
        builder = SparkSession.builder.appName(app_name)
        for name, value in wanted.items():
            builder = builder.config(name, value)
        try:
            spark = builder.getOrCreate()
        except BaseException as error:
            _end_forgotten_jvm(error)
            if isinstance(error, Exception) and (missing := missing_requirements()):
                raise SparkStartError("Spark can't start here", hint="; ".join(missing)) from None
            raise
    activate(spark)
    share_environment(spark)
    return spark


def share_environment(spark: Any) -> None:
    """Add STREAM_VARIABLES to the environment of the source's workers before a query starts.

    In Spark 4.3 all streams of a data source add them to one Scala map that has no lock. If two queries that
    start at the same time add a variable, the map counts it twice, and each later batch in this JVM fails
    with "Illegal size 5 of collection, expected 6". A variable that is present changes only its value, which
    Spark sets before it uses the environment. Does nothing for a session of Spark Connect.
    """
    if not hasattr(spark, "_jsparkSession"):
        return
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    # Workers may have no package before ``install``, and other versions of Spark may have other internals.
    with contextlib.suppress(PySparkException, Py4JError, TypeError):
        environment = environment_of_workers(spark)
        for name in STREAM_VARIABLES:
            environment.putIfAbsent(name, "")


def environment_of_workers(spark: Any) -> Any:
    """Return the environment, a map in the JVM, of the workers that plan and read the format kafkalite.

    Raises PySparkException if Spark does not find the format.
    """
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    return manager.lookupDataSource("kafkalite").dataSourceCls().envVars()


def activate(spark: Any) -> None:
    """Make ``spark`` the active session of the calling thread.

    Spark looks up a sink in Python in the active session, and a new thread has none. Does nothing for a
    session of Spark Connect, whose JVM is elsewhere.
    """
    if hasattr(spark, "_jsparkSession"):
        spark._jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def _end_forgotten_jvm(error: BaseException) -> None:
    """Kill the JVM that pyspark was starting when ``error``, such as Ctrl-C, was raised.

    The JVM would not end by itself. Its handle is taken from the frames of the traceback: from pyspark's
    ``launch_gateway`` or, while the process is being created, from ``subprocess``.
    """
    handles = {"launch_gateway": "proc", "_execute_child": "self"}
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        process: Any = frame.f_locals.get(handles.get(frame.f_code.co_name, ""))
        if getattr(process, "pid", None) is not None:
            process.kill()
            process.wait()
        trace = trace.tb_next


def _quiet_workers(cache: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the setting that selects ``quiet_daemon``, or {} if it is not in the SPARK_HOME of the JVM."""
    from pyspark import SparkContext

    jvm = SparkContext._jvm  # a running JVM keeps the SPARK_HOME with which it was started
    used = os.environ.get("SPARK_HOME") if jvm is None else jvm.System.getenv("SPARK_HOME")
    home = fast_start.shadow_home(cache)
    if home is None or used != str(home):
        return {}
    module = fast_start.quiet_daemon(home)
    return {"spark.python.daemon.module": module} if module is not None else {}


def _submitted_settings() -> dict[str, str]:
    """Return the running JVM's Spark settings if spark-submit started this program, else {}."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())
