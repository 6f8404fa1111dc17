"""Sessions and quick starts, as far as they need no JVM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkbridge.errors import FastStartError, SparkStartError
from sparkbridge.local import fast_start, spark_session
from sparkbridge.local.fast_start import (
    Java,
    cache_directory,
    can_make_class_archive,
    class_archive,
    make_class_archive,
    quiet_daemon,
    shadow_home,
)
from sparkbridge.local.quiet_daemon import quietly
from sparkbridge.local.spark_session import launch_environment, missing_requirements, recommended_settings

JAVA = Java("/usr/bin/java", 17, 'openjdk version "17.0.15" 2025-04-15')


@pytest.fixture(autouse=True)
def _a_java_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA)


def test_a_local_session_stays_on_this_machine_and_has_a_shuffle_partition_per_core(tmp_path: Path) -> None:
    settings = recommended_settings("local[3]", cache=tmp_path)
    assert settings["spark.master"] == "local[3]"
    assert settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert settings["spark.sql.shuffle.partitions"] == "3"
    assert settings["spark.python.unix.domain.socket.enabled"] == "true"
    assert "FileSystemBased" in settings["spark.sql.streaming.checkpointFileManagerClass"]


@pytest.mark.parametrize(
    ("master", "cores"),
    [("local", 1), ("local[2,4]", 2), ("local[*]", os.cpu_count()), ("local-cluster[3,2,1024]", 6)],
)
def test_cores_of_a_local_master(master: str, cores: int, tmp_path: Path) -> None:
    assert recommended_settings(master, cache=tmp_path)["spark.sql.shuffle.partitions"] == str(cores)


def test_a_cluster_keeps_its_addresses_its_interface_and_its_checkpoint_manager(tmp_path: Path) -> None:
    settings = recommended_settings("spark://master:7077", cache=tmp_path)
    assert "spark.python.unix.domain.socket.enabled" in settings
    for name in ("spark.driver.host", "spark.ui.enabled", "spark.sql.streaming.checkpointFileManagerClass"):
        assert name not in settings


def test_the_environment_is_as_before_once_the_jvm_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.1")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    before = dict(os.environ)
    with launch_environment("local[2]", tmp_path):
        assert os.environ["SPARK_LOCAL_IP"] == "10.0.0.1", "the user's word stands"
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
        assert Path(os.environ["SPARK_HOME"]).parent == tmp_path
    assert dict(os.environ) == before
    with launch_environment("spark://master:7077", tmp_path):
        assert os.environ.get("SPARK_HOME") == before.get("SPARK_HOME")
        assert "PYSPARK_PYTHON" not in os.environ, "executors have a Python of their own"


def test_a_shadow_home_has_pyspark_unpacked_in_place_of_the_zip(tmp_path: Path) -> None:
    home = shadow_home(tmp_path)
    assert home is not None
    assert (home / "python/lib/pyspark.zip/pyspark/__init__.py").exists()
    assert (home / "bin/spark-submit").exists()
    assert list((home / "python/lib").glob("py4j-*.zip"))
    assert shadow_home(tmp_path) == home


def test_processes_that_make_a_shadow_home_at_once_all_get_a_complete_one(tmp_path: Path) -> None:
    homes: list[Path | None] = []
    barrier = threading.Barrier(8)

    def make() -> None:
        barrier.wait()
        homes.append(shadow_home(tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(homes) == 8
    assert len(set(homes)) == 1
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [homes[0]], "nothing half made is left"


def test_without_a_writable_cache_spark_starts_slowly_and_without_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert shadow_home(tmp_path / "file" / "below") is None
    assert class_archive(tmp_path / "file" / "below") is None
    assert (
        "SharedArchiveFile"
        not in recommended_settings("local", cache=tmp_path / "file" / "below")[
            "spark.driver.extraJavaOptions"
        ]
    )


def test_the_user_names_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(fast_start.CACHE_VARIABLE, raising=False)
    assert cache_directory() == tmp_path / "xdg/kafkalite/spark"
    monkeypatch.setenv(fast_start.CACHE_VARIABLE, str(tmp_path / "named"))
    assert cache_directory() == tmp_path / "named"
    assert cache_directory(tmp_path / "argument") == tmp_path / "argument"


def test_one_process_makes_the_class_archive_and_others_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def record(home: Path, archive: Path) -> None:
        made.append(archive)
        with pytest.raises(FastStartError, match="another process is making"):
            make_class_archive(tmp_path)
        archive.write_text("classes")

    monkeypatch.setattr(fast_start, "_record", record)
    assert class_archive(tmp_path) is None
    archive = make_class_archive(tmp_path)
    assert made == [archive]
    assert make_class_archive(tmp_path) == archive
    assert made == [archive], "it is kept"
    options = recommended_settings("local", cache=tmp_path)["spark.driver.extraJavaOptions"]
    assert f"-XX:SharedArchiveFile={archive}" in options


def test_an_archive_that_cannot_be_made_raises_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(home: Path, archive: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fast_start, "_record", record)
    with pytest.raises(FastStartError, match=r"can't be written: No space left on device") as caught:
        make_class_archive(tmp_path)
    assert "KAFKALITE_SPARK_CACHE" in caught.value.hint


def test_without_a_writable_cache_no_archive_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert not can_make_class_archive(tmp_path / "file")
    with pytest.raises(FastStartError, match="cannot write to"):
        make_class_archive(tmp_path / "file")
    assert can_make_class_archive(tmp_path / "cache")
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    make_class_archive(tmp_path / "cache")
    assert not can_make_class_archive(tmp_path / "cache"), "it is there"
    monkeypatch.setattr(fast_start, "find_java", lambda: None)
    assert not can_make_class_archive(tmp_path / "cache")
    with pytest.raises(FastStartError, match="no working java"):
        make_class_archive(tmp_path / "cache")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo first >&2; echo 'ValueError: of Spark' >&2; exit 1", "warm-up failed: ValueError: of Spark"),
        ("exit 0", "Java wrote no archive"),
        ('echo partly >"$3"; sleep 60 & echo $! >"$3.child"; wait', "did not end within 0.2 s"),
    ],
)
def test_a_warm_up_that_fails_leaves_neither_file_nor_process(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(fast_start, "WARM_UP_TIMEOUT_S", 0.2 if "sleep" in script else 60)
    cache = tmp_path / "cache"
    with pytest.raises(FastStartError, match=problem):
        make_class_archive(cache)
    left = {path.suffix for path in cache.glob("*java17*")}
    assert left <= {".lock", ".child"}
    for path in cache.glob("*.child"):
        deadline_s = time.monotonic() + 10
        while _runs(path.read_text().strip()):
            assert time.monotonic() < deadline_s, "it was not killed"
            time.sleep(0.01)


def _runs(pid: str) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return False


def test_unusable_files_are_removed_when_an_archive_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    gone, other = tmp_path / "home-4.2.0-aaaaaaaaaaaa", tmp_path / "home-4.2.0-bbbbbbbbbbbb"
    for home, target in ((gone, tmp_path / "gone"), (other, tmp_path)):
        home.mkdir()
        (home / "jars").symlink_to(target)
        home.with_name(f"{home.name}-java17-cccccccccccc.jsa").write_text("classes")
    mine = shadow_home(tmp_path)
    assert mine is not None
    torn = tmp_path / f"{mine.name}-java17-{fast_start._digest(JAVA.banner)}.4711"
    torn.write_text("half")
    archive = make_class_archive(tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert left == {mine.name, archive.name, other.name, f"{other.name}-java17-cccccccccccc.jsa"}


def test_files_of_another_user_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    assert make_class_archive(tmp_path).exists()
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    if tmp_path.stat().st_uid == 0:  # root's files are trusted
        for path in tmp_path.iterdir():
            os.chown(path, 54_321, -1)
    assert shadow_home(tmp_path) is None
    assert class_archive(tmp_path) is None


def test_both_are_made_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fast_start.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    assert fast_start.main() == 0
    assert capsys.readouterr().out == f"SPARK_HOME: {shadow_home()}\nclass archive: {class_archive()}\n"
    monkeypatch.setattr(fast_start, "find_java", lambda: None)
    assert fast_start.main() == 1
    assert "no class archive: no working java was found" in capsys.readouterr().err


def test_another_java_has_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    first = make_class_archive(tmp_path)
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA._replace(major=21, banner="another"))
    assert class_archive(tmp_path) is None
    assert make_class_archive(tmp_path) != first


@pytest.mark.parametrize(
    ("banner", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
    ],
)
def test_java_versions(banner: str, major: int) -> None:
    found = fast_start._JAVA_VERSION.search(banner)
    assert found is not None
    assert int(found[1]) == major


def test_a_checkout_installs_with_its_own_script() -> None:
    assert spark_session._how_to_install() == "bin/setup"


def test_missing_requirements_are_listed_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_requirements() == []
    monkeypatch.setattr(fast_start, "find_java", lambda: None)
    assert "no working java" in missing_requirements()[0]
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA._replace(major=11))
    assert "is Java 11; Java 17 or newer is needed" in missing_requirements()[0]
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA)
    versions = {"pyspark": "4.1.2", "pyarrow": "26.0.1"}
    monkeypatch.setattr(spark_session.metadata, "version", versions.__getitem__)
    assert missing_requirements() == ["pyspark 4.1.2 is too old, 4.2 is needed: pip install -U pyspark"]
    versions["pyspark"] = "4.10.0.dev1"
    assert missing_requirements() == []


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_worker_whose_jvm_closes_the_connection_ends_quietly(is_quiet: bool, tmp_path: Path) -> None:
    """The test plays the JVM: it starts the daemon, lets it fork a worker, and closes the connection."""
    home = shadow_home(tmp_path)
    assert home is not None
    module = quiet_daemon(home) if is_quiet else "pyspark.daemon"
    assert module is not None
    library = home / "python/lib"
    paths = [library / "pyspark.zip", *library.glob("py4j-*.zip")]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "PATH": os.environ["PATH"],
    }
    with (
        tempfile.TemporaryDirectory() as sockets,  # tmp_path may be too long for a socket's path
        subprocess.Popen(
            [sys.executable, "-P", "-m", module, "pyspark.worker"],
            env=environment | {"PYTHON_WORKER_FACTORY_SOCK_DIR": sockets},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as daemon,
    ):
        assert daemon.stdin is not None and daemon.stdout is not None and daemon.stderr is not None
        address = daemon.stdout.read(int.from_bytes(daemon.stdout.read(4), "big"))
        with socket.socket(socket.AF_UNIX) as jvm:
            jvm.connect(address)
            worker = int.from_bytes(jvm.recv(4), "big")
        while Path(f"/proc/{worker}").exists():
            time.sleep(0.01)
        daemon.stdin.close()
        told = daemon.stderr.read().decode()
    assert ("BrokenPipeError" in told) is not is_quiet, told
    assert not is_quiet or not told


def test_other_errors_of_a_worker_are_reported() -> None:
    def fail(sock: object, authenticated: bool) -> int:
        raise RuntimeError("something")

    with pytest.raises(RuntimeError):
        quietly(fail)(None, True)
    assert quietly(lambda sock, authenticated: 0)(None, True) == 0


def test_workers_are_quiet_where_the_jvm_finds_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's SPARK_HOME, or a running JVM, does not have our module: no worker would start."""
    home = shadow_home(tmp_path)
    assert home is not None
    monkeypatch.setattr("pyspark.SparkContext._jvm", None)
    monkeypatch.setenv("SPARK_HOME", str(home))
    assert spark_session._quiet_workers(tmp_path) == {"spark.python.daemon.module": quiet_daemon(home)}
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert spark_session._quiet_workers(tmp_path) == {}
    running = SimpleNamespace(System=SimpleNamespace(getenv={"SPARK_HOME": str(home)}.get))
    monkeypatch.setattr("pyspark.SparkContext._jvm", running)
    assert len(spark_session._quiet_workers(tmp_path)) == 1
    assert spark_session._quiet_workers(tmp_path / "another") == {}
    for module in (home / "python/lib/pyspark.zip").glob("*.py"):
        module.unlink()
    monkeypatch.setattr(Path, "write_text", _refuse)
    assert spark_session._quiet_workers(tmp_path) == {}


def _refuse(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


def test_ctrl_c_while_the_jvm_starts_leaves_none_behind(tmp_path: Path) -> None:
    """With a SPARK_HOME whose JVM never reports."""
    script, told = tmp_path / "home/bin/spark-submit", tmp_path / "pid"
    script.parent.mkdir(parents=True)
    script.write_text(
        f'#!/bin/sh\necho $$ >"{told}.new"\nmv "{told}.new" "{told}"\nexec sleep 100 >/dev/null 2>&1\n'
    )
    script.chmod(0o755)
    environment = os.environ | {
        "SPARK_HOME": str(tmp_path / "home"),
        fast_start.CACHE_VARIABLE: str(tmp_path),
    }
    program = "from sparkbridge import session; session(master='local')"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
    ) as driver:
        while not told.exists():
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.01)
        jvm = Path(f"/proc/{told.read_text().strip()}")
        assert jvm.exists()
        driver.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in driver.communicate()[1]
        is_left = jvm.exists()
        if is_left:
            os.kill(int(jvm.name), signal.SIGKILL)
    assert not is_left


def test_ctrl_c_while_the_process_of_the_jvm_is_made_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[subprocess.Popen[bytes]] = []
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def interrupted(process: subprocess.Popen[bytes], *arguments: object) -> None:
        made.append(process)
        with monkeypatch.context() as patches:
            patches.setattr(subprocess.os, "read", _interrupt)  # of the child's report that it has started
            execute(process, *arguments)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        subprocess.Popen(["sleep", "100"], preexec_fn=lambda: None)
    spark_session._end_forgotten_jvm(raised.value)
    assert [process.returncode for process in made] == [-signal.SIGKILL]


def _interrupt(*_arguments: object) -> bytes:
    raise KeyboardInterrupt


def test_settings_of_spark_submit_override_the_recommended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a job submitted to a cluster would run on the submitting machine."""
    told: dict[str, str] = {}

    class Builder:
        def appName(self, name: str) -> Builder:
            return self

        def config(self, name: str, value: str) -> Builder:
            told[name] = value
            return self

        def getOrCreate(self) -> None:
            pass

    monkeypatch.setattr("pyspark.sql.SparkSession.builder", Builder())
    submitted = {"spark.master": "spark://master:7077", "spark.ui.showConsoleProgress": "true", "a": "b"}
    monkeypatch.setattr(spark_session, "_submitted_settings", lambda: submitted)
    spark_session.session("job")
    assert told["spark.master"] == "spark://master:7077"
    assert told["spark.ui.showConsoleProgress"] == "true"
    assert "spark.driver.host" not in told
    assert "a" not in told, "Spark has it already"
    spark_session.session("job", master="local[3]", settings={"spark.sql.shuffle.partitions": 7})
    assert told["spark.master"] == "local[3]"
    assert told["spark.sql.shuffle.partitions"] == "7"
    monkeypatch.setattr(spark_session, "_submitted_settings", dict)
    monkeypatch.delenv("MASTER", raising=False)
    spark_session.session("job")
    assert told["spark.master"] == "local[*]"


def test_a_start_without_java_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def appName(self, name: str) -> Builder:
            return self

        def config(self, name: str, value: str) -> Builder:
            return self

        def getOrCreate(self) -> None:
            raise RuntimeError("[JAVA_GATEWAY_EXITED]")

    monkeypatch.setattr("pyspark.sql.SparkSession.builder", Builder())
    monkeypatch.setattr(spark_session, "missing_requirements", list)
    with pytest.raises(RuntimeError, match="GATEWAY"):
        spark_session.session("job")
    monkeypatch.setattr(spark_session, "missing_requirements", lambda: ["no working java was found"])
    with pytest.raises(SparkStartError, match="can't start here") as caught:
        spark_session.session("job")
    assert caught.value.hint == "no working java was found"
    assert caught.value.__suppress_context__, "no traceback of Spark is printed above the sentence"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from sparkbridge import KafkaliteDataSource", "needs the package pyspark, which is not installed"),
        ("from sparkbridge import foreach_batch; foreach_batch", ""),
        (
            "import sparkbridge; sparkbridge.session('x')",
            "SparkStartError: Spark can't start here (pyspark is",
        ),
    ],
)
def test_without_pyspark_one_sentence_says_what_to_install(repository: Path, code: str, told: str) -> None:
    hide = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'pyspark':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide + code], capture_output=True, text=True, cwd=repository, timeout=240
    )
    last = done.stderr.strip().splitlines()[-1] if done.stderr else ""
    assert told in last
    assert "ModuleNotFoundError" not in last
    assert not told or "kafkalite[spark]" in last or "bin/setup" in last
