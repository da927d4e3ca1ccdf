"""Everyone who reads a failure reads its kind: from one real pass of the real command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler import database as db
from tests.cli.conftest import Run
from tests.cli.test_commands import as_list, manifest
from tests.listeners import schema
from tests.listeners.conftest import Probe, outbox, register, setting
from tests.listeners.receiver import receiving, verify
from tests.sql.hosts import Attempt, Standalone, again, evicted, poke, running, settle, success

SECRET = "whsec_" + "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"
EVICTED = "reports/001-evicted-memory-no-container-statuses"
CRASHED = "reports/086-plain-exit-1-no-record"

CALLBACKS = """
import json, os
from pathlib import Path

def _write(name, context):
    with (Path(os.environ["PROBE_FOLDER"]) / "callbacks").open("a") as file:
        ti = context["task_instance"]
        file.write(json.dumps({
            "name": name, "task": ti.task_id, "kind": context["failure_kind"], "reason": context["reason"],
            "exception": [type(context["exception"]).__name__, context["exception"].failure_kind],
            "try_number": context["try_number"], "id": context["event_id"],
        }) + "\\n")

def failed(context):
    _write("failed", context)

def retried(context):
    _write("retried", context)

def special(context):
    _write("special", context)

def raises(context):
    raise RuntimeError("no")
"""


def configure(probe: Probe, toml: str) -> dict[str, str]:
    (probe.folder / "probe_callbacks.py").write_text(CALLBACKS)
    path = probe.folder / "callbacks.toml"
    path.write_text(toml)
    return {"PODSETTLE_CALLBACKS": str(path)}


def samples(text: str) -> dict[str, float]:
    """Read Prometheus's text format: sample name with labels -> value."""
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }


def test_from_one_pass_every_consumer_gets_the_kind_and_the_reason(
    connection: db.Connection,
    database: str,
    host: Standalone,
    probe: Probe,
    podsettle: Callable[..., Run],
    tmp_path: Path,
) -> None:
    lost, broke = running(host, task="lost"), running(host, task="broke")
    callbacks = configure(
        probe,
        '[defaults]\non_failure_callback = "probe_callbacks:failed"\n'
        'on_retry_callback = ["probe_callbacks:retried"]\n',
    )
    textfile = tmp_path / "podsettle.prom"
    with receiving() as webhook, receiving() as pushgateway:
        run = podsettle(
            "reconcile",
            "--dsn",
            database,
            "--pods",
            "-",
            "--output",
            "json",
            stdin=as_list(manifest(EVICTED, lost), manifest(CRASHED, broke)),
            PODSETTLE_LISTENERS="recorder,callbacks,log,webhook",
            PODSETTLE_WEBHOOK_URL=f"{webhook.url}/hook",
            PODSETTLE_WEBHOOK_SECRET=SECRET,
            PODSETTLE_METRICS_FILE=str(textfile),
            PODSETTLE_PUSHGATEWAY=pushgateway.url,
            **probe.environment,
            **callbacks,
        )
    assert run.code == 0, run.err
    expected = {"lost": ("infra", "Evicted"), "broke": ("application", "Error")}
    assert {row["task_instance_id"]: (row["failure_kind"], row["reason"]) for row in run.rows} == {
        lost.id: expected["lost"],
        broke.id: expected["broke"],
    }

    # A recording listener.
    told = [line for line in probe.told("recorder") if line["hook"] == "failed"]
    assert {line["task"]: (line["kind"], line["reason"]) for line in told} == expected
    # The author's callbacks: on_failure for the terminal failure only.
    called = probe.told("callbacks")
    assert {line["task"]: (line["kind"], line["reason"]) for line in called} == expected
    assert {line["task"]: line["name"] for line in called} == {"lost": "retried", "broke": "failed"}
    assert {line["task"]: line["exception"] for line in called} == {
        "lost": ["TaskFailed", "infra"],
        "broke": ["TaskFailed", "application"],
    }
    # The log.
    logged = [e for e in run.events if e["event"] == "TaskInstance Finished"]
    assert {e["task_id"]: (e["failure_kind"], e["reason"]) for e in logged} == expected
    assert {e["task_id"]: e["refund"] for e in logged} == {"lost": "1/3", "broke": "0/3"}
    assert len([e for e in run.events if e["event"] == "pass finished"]) == 1
    # The webhook.
    events = {}
    for received in webhook.received:
        assert (received.method, received.path) == ("POST", "/hook")
        assert verify(SECRET, received)
        event = json.loads(received.body)
        event_schema = schema.load("task-instance-event.schema.json")
        assert schema.problems(event, event_schema, event_schema) == []
        assert received.headers["webhook-id"] == event["id"]
        events[event["data"]["task_instance"]["task_id"]] = event
    assert {
        task: (event["data"]["failure_kind"], event["data"]["reason"])
        for task, event in events.items()
    } == expected
    assert {task: event["type"] for task, event in events.items()} == {
        "lost": "io.podsettle.task_instance.retry",
        "broke": "io.podsettle.task_instance.failed",
    }
    assert events["lost"]["data"]["refund"] == {
        "given": True,
        "taken_back": False,
        "n": 1,
        "cap": 3,
    }
    # The metrics, in both places.
    (pushed,) = pushgateway.received
    assert (pushed.method, pushed.path) == ("PUT", "/metrics/job/podsettle")
    for text in (textfile.read_text(), pushed.body.decode()):
        found = samples(text)
        for task, (kind, reason) in expected.items():
            name = (
                "podsettle_ti_failures_total"
                f'{{dag_id="d",failure_kind="{kind}",reason="{reason}",task_id="{task}"}}'
            )
            assert found[name] == 1
        assert found['podsettle_pass_pods{namespace="*"}'] == 2
    # Nothing of the pod's own arguments, nowhere.
    assert "registry.example.com" not in run.err + str(webhook.received) + textfile.read_text()


def test_a_delivery_problem_changes_neither_what_was_settled_nor_the_exit_code(
    connection: db.Connection,
    database: str,
    host: Standalone,
    probe: Probe,
    podsettle: Callable[..., Run],
) -> None:
    attempt = running(host, task="bad")
    probe.trouble("bad", "kill")
    run = podsettle(
        "reconcile",
        "--dsn",
        database,
        "--pods",
        "-",
        stdin=as_list(manifest(EVICTED, attempt)),
        PODSETTLE_LISTENERS="troubled,nobody,NO-NAME",
        PODSETTLE_METRICS_FILE="/no/such/folder/x.prom",
        PODSETTLE_PUSHGATEWAY="127.0.0.1:9",
        **probe.environment,
    )
    assert run.code == 0, run.err
    assert host.row(attempt.id)["state"] == "up_for_retry"
    said = [e["event"] for e in run.events if e["level"] == "error"]
    assert said == [
        "listener not installed",
        "listener not installed",
        "listener not registered",
        "metrics not written",
        "metrics not pushed",
    ]
    problems = {e["listener"]: e["problem"] for e in run.events if e["event"] == "delivery problem"}
    assert set(problems) == {"troubled", "nobody"}
    assert problems["troubled"].endswith("its process ended with signal 9")
    shown = podsettle("status", "--dsn", database, "--output", "json")
    status = json.loads(shown.out)
    assert [(e["listener"], e["tries"]) for e in status["stuck"]] == [("troubled", 1)]
    assert {e["name"]: e["pending"] for e in status["listeners"]} == {"nobody": 1, "troubled": 1}


def test_a_pass_that_cannot_list_still_delivers(
    connection: db.Connection,
    database: str,
    host: Standalone,
    probe: Probe,
    podsettle: Callable[..., Run],
    tmp_path: Path,
) -> None:
    register(connection, "recorder")
    attempt = running(host, task="a")
    connection.execute("call settle.fail(%s, 1, 'application', 'Error')", (attempt.id,))
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    run = podsettle("reconcile", "--dsn", database, **probe.environment, KUBECONFIG=str(kubeconfig))
    assert run.code == 5, run.err
    assert probe.tasks("recorder") == ["a"]


def test_a_dry_run_registers_and_tells_nobody(
    connection: db.Connection,
    database: str,
    host: Standalone,
    probe: Probe,
    podsettle: Callable[..., Run],
) -> None:
    register(connection, "recorder")
    attempt = running(host, task="a")
    run = podsettle(
        "reconcile",
        "--dsn",
        database,
        "--dry-run",
        "--pods",
        "-",
        stdin=as_list(manifest(EVICTED, attempt)),
        PODSETTLE_LISTENERS="recorder,troubled",
        **probe.environment,
    )
    assert run.code == 0, run.err
    assert probe.told("recorder") == []
    rows = connection.execute("select name from settle.listener").fetchall()
    assert rows == [{"name": "recorder"}]


# --- the webhook --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (500, "WebhookRefused: 127.0.0.1 answered 500"),
        (302, "WebhookRefused: 127.0.0.1 answered 302"),
        ("drop", "WebhookRefused: no answer of 127.0.0.1: ProtocolError"),
        ("slow", "WebhookRefused: no answer of 127.0.0.1: ReadTimeoutError"),
    ],
)
def test_a_receiver_in_trouble_gets_the_event_again(
    connection: db.Connection,
    host: Standalone,
    deliver: Callable[..., Run],
    answer: int | str,
    error: str,
) -> None:
    register(connection, "webhook")
    settle(connection, evicted(running(host, task="a")))
    with receiving() as receiver:
        receiver.answers = [answer]
        environment = {
            "PODSETTLE_WEBHOOK_URL": receiver.url.replace("//", "//user:pass@"),
            "PODSETTLE_WEBHOOK_SECRET": SECRET,
            "PODSETTLE_WEBHOOK_TIMEOUT": "0.5",
        }
        run = deliver(**environment)
        assert run.out == "webhook: 0 delivered, 1 failed, 0 set aside\n"
        (row,) = outbox(connection, "webhook")
        assert row["last_error"] == error
        assert "pass@" not in run.err
        connection.execute("update settle.outbox set due_at = null")
        assert deliver(**environment).out == "webhook: 1 delivered, 0 failed, 0 set aside\n"
    first, second = receiver.received
    assert first.path == second.path == "/"
    # The same id and the same content; signed anew.
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == str(row["id"])
    assert first.body == second.body
    assert verify(SECRET, first)
    assert verify(SECRET, second)


def test_an_answer_without_end_is_not_read(
    connection: db.Connection, host: Standalone, deliver: Callable[..., Run]
) -> None:
    register(connection, "webhook")
    settle(connection, evicted(running(host)))
    with receiving() as receiver:
        receiver.answers = ["endless"]
        run = deliver(
            PODSETTLE_WEBHOOK_URL=receiver.url,
            PODSETTLE_WEBHOOK_SECRET="not base64, used as it is",
        )
        assert run.out == "webhook: 1 delivered, 0 failed, 0 set aside\n"


def test_every_kind_of_event_fits_the_schema(
    connection: db.Connection, host: Standalone, deliver: Callable[..., Run], tmp_path: Path
) -> None:
    register(connection, "webhook")
    lost = running(host, dag="ä/b c", task="t")
    settle(connection, evicted(lost))
    settle(connection, success(again(host, lost)))
    settle(connection, poke(running(host)))
    broke: Attempt = running(host)
    connection.execute("call settle.mark_failed(%s, %s)", (broke.id, 'a "note"\n'))
    connection.execute("call settle.clear(%s)", (broke.id,))
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    with receiving() as receiver:
        run = deliver(
            PODSETTLE_WEBHOOK_URL=receiver.url,
            PODSETTLE_WEBHOOK_SECRET_FILE=str(secret),
            PODSETTLE_WEBHOOK_SOURCE="/prod",
        )
    assert run.code == 0
    event_schema = schema.load("task-instance-event.schema.json")
    events = [json.loads(received.body) for received in receiver.received]
    for event in events:
        assert schema.problems(event, event_schema, event_schema) == []
        assert event["source"] == "/prod"
        assert event["subject"].isascii()
    assert sorted(event["type"].rpartition(".")[2] for event in events) == [
        "cleared",
        "failed",
        "reschedule",
        "retry",
        "success",
    ]
    # The check itself can fail.
    broken = events[0] | {"data": {**events[0]["data"], "failure_kind": "gremlins"}}
    assert schema.problems(broken, event_schema, event_schema)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "PODSETTLE_WEBHOOK_URL must be an http or https URL"),
        ({"PODSETTLE_WEBHOOK_URL": "ftp://x/"}, "must be an http or https URL"),
        ({"PODSETTLE_WEBHOOK_URL": "http://x/"}, "PODSETTLE_WEBHOOK_SECRET (or"),
        (
            {"PODSETTLE_WEBHOOK_URL": "http://x/", "PODSETTLE_WEBHOOK_SECRET": "whsec_%%"},
            "is no Base64",
        ),
        (
            {"PODSETTLE_WEBHOOK_URL": "http://x/", "PODSETTLE_WEBHOOK_SECRET": "short"},
            "fewer than 16 bytes",
        ),
    ],
)
def test_a_webhook_that_cannot_be_is_said_and_costs_no_try(
    connection: db.Connection,
    host: Standalone,
    deliver: Callable[..., Run],
    environment: dict[str, str],
    why: str,
) -> None:
    register(connection, "webhook")
    settle(connection, evicted(running(host)))
    run = deliver(**environment)
    (problem,) = [e["problem"] for e in run.events if e["event"] == "delivery problem"]
    assert why in problem
    assert outbox(connection, "webhook")[0]["tries"] == 0


# --- the author's callbacks ---------------------------------------------------------------------


def test_the_closest_callback_is_called_for_a_pass_a_person_and_an_agent_alike(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Callable[..., Run]
) -> None:
    register(connection, "callbacks")
    environment = configure(
        probe,
        """
[defaults]
on_failure_callback = "probe_callbacks:failed"
on_retry_callback = "probe_callbacks:retried"
[dags."my.dag"]
on_failure_callback = ["probe_callbacks:failed", "probe_callbacks:special"]
[dags."my.dag".tasks.quiet]
on_failure_callback = []
""",
    )
    by_pass = running(host, dag="my.dag", task="by_pass")
    settle(connection, evicted(by_pass))
    by_agent = running(host, dag="my.dag", task="by_agent", retries=1)
    connection.execute(
        "select settle.report(attempt_id => %s, outcome => 'failed', exit_code => 1)",
        (by_agent.attempt_id,),
    )
    by_person = running(host, dag="my.dag", task="by_person")
    connection.execute("call settle.mark_failed(%s)", (by_person.id,))
    quiet = running(host, dag="my.dag", task="quiet")
    connection.execute("call settle.fail(%s, 1, 'application', 'Error')", (quiet.id,))
    settle(connection, success(running(host, dag="my.dag", task="fine")))
    run = deliver(**environment)
    assert run.out == "callbacks: 5 delivered, 0 failed, 0 set aside\n", run.err
    called = [(line["name"], line["task"], line["kind"]) for line in probe.told("callbacks")]
    assert sorted(called, key=str) == sorted(
        [
            ("retried", "by_pass", "infra"),
            ("retried", "by_agent", "application"),
            ("failed", "by_person", "manual"),
            ("special", "by_person", "manual"),
        ],
        key=str,
    )


def test_a_callback_that_raises_is_called_again(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Callable[..., Run]
) -> None:
    register(connection, "callbacks")
    setting(connection, "outbox_backoff", "0 s")
    setting(connection, "outbox_tries", "2")
    environment = configure(
        probe,
        '[defaults]\non_retry_callback = ["probe_callbacks:retried", "probe_callbacks:raises"]\n',
    )
    settle(connection, evicted(running(host)))
    assert deliver(**environment).out == "callbacks: 0 delivered, 1 failed, 1 set aside\n"
    first, second = probe.told("callbacks")
    assert first == second


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[default]\n", "the file has 'default'; known: defaults, dags"),
        ("dags = 3\n", "[dags] must be a table"),
        ("[defaults]\non_failed_callback = 'a:b'\n", "[defaults] has 'on_failed_callback'"),
        ("[dags.a.tasks.b]\non_retry_callback = 'ab'\n", "must be 'module:function'"),
        ("[dags.a.tasks.b.c]\n", "[dags.a.tasks.b] has 'c'"),
        ("not toml", "callbacks.toml"),
    ],
)
def test_a_configuration_that_cannot_be_is_said(
    connection: db.Connection,
    host: Standalone,
    probe: Probe,
    deliver: Callable[..., Run],
    toml: str,
    why: str,
) -> None:
    register(connection, "callbacks")
    settle(connection, evicted(running(host)))
    run = deliver(**configure(probe, toml))
    (problem,) = [e["problem"] for e in run.events if e["event"] == "delivery problem"]
    assert re.search(re.escape(why), problem)
    assert outbox(connection, "callbacks")[0]["tries"] == 0
