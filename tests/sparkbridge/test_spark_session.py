"""Sessions and quick starts, as far as they need no JVM."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sparkbridge import fast_start, spark_session
from sparkbridge.fast_start import Java, cache_directory, class_archive, shadow_home
from sparkbridge.spark_session import launch_environment, missing_requirements, recommended_settings

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


def test_a_shadow_home_has_pyspark_unpacked_where_spark_asks_for_a_zip(tmp_path: Path) -> None:
    home = shadow_home(tmp_path)
    assert home is not None
    assert (home / "python/lib/pyspark.zip/pyspark/__init__.py").exists()
    assert (home / "bin/spark-submit").exists()
    assert list((home / "python/lib").glob("py4j-*.zip"))
    assert shadow_home(tmp_path) == home


def test_processes_that_make_a_shadow_home_at_once_all_get_a_whole_one(tmp_path: Path) -> None:
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


def test_without_a_place_for_them_there_are_no_quick_starts_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert shadow_home(tmp_path / "file" / "below") is None
    assert class_archive(tmp_path / "file" / "below", makes=True) is None
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
        assert class_archive(tmp_path, makes=True) is None, "somebody else is at it"
        archive.write_text("classes")

    monkeypatch.setattr(fast_start, "_record", record)
    assert class_archive(tmp_path) is None
    archive = class_archive(tmp_path, makes=True)
    assert made == [archive]
    assert class_archive(tmp_path, makes=True) == archive
    assert made == [archive], "it is kept"
    options = recommended_settings("local", cache=tmp_path)["spark.driver.extraJavaOptions"]
    assert f"-XX:SharedArchiveFile={archive}" in options


def test_an_archive_that_can_not_be_made_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(home: Path, archive: Path) -> None:
        raise subprocess.CalledProcessError(1, "java")

    monkeypatch.setattr(fast_start, "_record", record)
    assert class_archive(tmp_path, makes=True) is None


def test_what_another_user_has_put_there_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    assert class_archive(tmp_path, makes=True) is not None
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    if tmp_path.stat().st_uid == 0:  # what is root's is trusted
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
    assert "class archive: could not be made" in capsys.readouterr().out


def test_another_java_has_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_text("classes"))
    first = class_archive(tmp_path, makes=True)
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA._replace(major=21, banner="another"))
    assert class_archive(tmp_path) is None
    assert class_archive(tmp_path, makes=True) != first


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


def test_what_is_missing_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_requirements() == []
    monkeypatch.setattr(fast_start, "find_java", lambda: None)
    assert "no java" in missing_requirements()[0]
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA._replace(major=11))
    assert "is Java 11; Java 17 or newer is needed" in missing_requirements()[0]
    monkeypatch.setattr(fast_start, "find_java", lambda: JAVA)
    versions = {"pyspark": "4.1.2", "pyarrow": "26.0.1"}
    monkeypatch.setattr(spark_session.metadata, "version", versions.__getitem__)
    assert missing_requirements() == ["pyspark 4.1.2 is too old, 4.2 is needed: pip install -U pyspark"]
    versions["pyspark"] = "4.10.0.dev1"
    assert missing_requirements() == []


def test_what_spark_submit_was_told_goes_before_what_we_recommend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job submitted to a cluster would run on the machine that submits it."""
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
