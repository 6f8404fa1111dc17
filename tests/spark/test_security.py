"""Source and sink over SASL_SSL and over mutual TLS in Spark: planning, tasks, commits, and what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafkalite import sync
from kafkalite.testing.sync_cluster import SyncCluster

pytest.importorskip("cryptography")

KEY_PASSWORD = "of a key that is not encrypted"
WRONG_PASSWORD = "a password of nobody"
QUERY_TIMEOUT_S = 60


@pytest.fixture(scope="module", params=["SASL_SSL", "SSL"])
def broker(request: pytest.FixtureRequest) -> Iterator[SyncCluster]:
    """A broker that requires a login over TLS, or the certificate of the client."""
    auth = {"ssl_client_auth": "required"} if request.param == "SSL" else {}
    with SyncCluster(transport="tcp", security_protocol=request.param, **auth) as cluster:
        yield cluster


@pytest.fixture
def settings(broker: SyncCluster) -> dict[str, Any]:
    """The settings of a client, with what the broker requires."""
    settings = {**broker.client_settings, "ssl_key_password": KEY_PASSWORD}
    if settings["security_protocol"] == "SASL_SSL":
        del settings["ssl_keystore_location"]
        settings["sasl_mechanism"] = "SCRAM-SHA-256"
    return settings


@pytest.fixture
def options(broker: SyncCluster, settings: dict[str, Any]) -> dict[str, str]:
    """The same as options of Spark."""
    named = {f"kafka.{name.replace('_', '.')}": str(value) for name, value in settings.items()}
    return {"kafka.bootstrap.servers": broker.bootstrap_servers, **named}


def shown(spark: Any, *frames: Any) -> str:
    """Return all texts of Spark about these frames and about each execution: plans, and pages of its UI."""
    texts = [frame._jdf.queryExecution().toString() for frame in frames]
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    for number in range(executions.size()):
        each = executions.apply(number)
        texts += [each.description(), each.details(), each.physicalPlanDescription()]
    return "\n".join(texts)


def test_batches_and_streams_are_encrypted_and_show_no_password(
    spark: Any,
    broker: SyncCluster,
    settings: dict[str, Any],
    options: dict[str, str],
    new_topic_on: Callable[..., str],
    checkpoint: str,
) -> None:
    first, second = (new_topic_on(hint, partitions=2) for hint in ("secured-in", "secured-out"))
    values = spark.range(100).selectExpr("CAST(id AS STRING) AS value").repartition(2)
    values.write.format("kafkalite").options(**options, topic=first).mode("append").save()
    batch = spark.read.format("kafkalite").options(**options, subscribe=first).load()
    assert batch.count() == 100
    batch.createOrReplaceTempView("secured")
    stream = spark.readStream.format("kafkalite").options(**options, subscribe=first)
    stream = stream.option("startingOffsets", "earliest").load()
    writer = stream.select("value").writeStream.format("kafkalite").options(**options, topic=second)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_TIMEOUT_S)
    with sync.Consumer(
        second, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest", **settings
    ) as consumer:
        found = [consumer.get_one().value for _ in range(100)]
    assert sorted(found) == sorted(b"%d" % number for number in range(100))
    texts = shown(spark, batch, stream) + str(query.lastProgress) + query._jsq.explainInternal(True)
    assert f"kafka.security.protocol={settings['security_protocol']}" in texts, "options are shown"
    for name in ("sasl_password", "ssl_key_password"):
        assert settings.get(name, KEY_PASSWORD) not in texts


def test_a_refused_client_is_one_error_of_the_driver(
    spark: Any, broker: SyncCluster, options: dict[str, str], checkpoint: str
) -> None:
    """No task runs, and nothing is tried again. The error names the broker and not the password."""
    if "kafka.sasl.password" in options:
        options["kafka.sasl.password"] = WRONG_PASSWORD
        reason = "SaslAuthenticationError: 127.0.0.1.*authentication failed: unknown user, or wrong password"
    else:
        del options["kafka.ssl.keystore.location"]
        reason = "SslAuthenticationError: .*127.0.0.1.*it requires a certificate"
    read = spark.read.format("kafkalite").options(**options, subscribe="any").load()
    rows = spark.range(1).selectExpr("CAST(id AS STRING) AS value")
    written = rows.write.format("kafkalite").options(**options, topic="any").mode("append")
    stream = spark.readStream.format("kafkalite").options(**options, subscribe="any").load()
    writer = stream.writeStream.format("noop").option("checkpointLocation", checkpoint)

    def run_stream() -> None:
        writer.trigger(availableNow=True).start().awaitTermination(QUERY_TIMEOUT_S)

    for run in (read.count, written.save, run_stream):
        accepted = broker.statistics().connections_accepted
        with pytest.raises(Exception, match=reason) as caught:
            run()
        assert broker.statistics().connections_accepted == accepted + 1
        assert WRONG_PASSWORD not in str(caught.value)
        assert KEY_PASSWORD not in str(caught.value)
