"""Pushes and reports: what is sent, what is retried, what never changes the outcome."""

from __future__ import annotations

import datetime as dt
import itertools
import signal
import socket
import ssl
import subprocess

import pytest

from tests.needs import needs
from tests.shim.harness import ControlPlane, child

SUCCESS = {"v": 1, "outcome": "success", "attempt_id": "attempt-1"}
REPORT = ("/rpc/report", {"attempt_id": "attempt-1", "outcome": "success"})


def undelivered(detail: str) -> dict[str, object]:
    return {
        "v": 1,
        "outcome": "failed",
        "exit_code": 69,
        "reason": f"OutputUndelivered: {detail}",
        "attempt_id": "attempt-1",
    }


@pytest.mark.parametrize(
    ("task", "options", "report"),
    [
        (("/bin/true",), (), {"outcome": "success"}),
        (("/bin/false",), (), {"outcome": "failed", "exit_code": 1}),
        (
            ("/bin/sleep", "600"),
            ("--timeout", "0.05"),
            {
                "outcome": "failed",
                "exit_code": 143,
                "failure_kind": "timeout",
                "reason": "ExecutionTimeout",
            },
        ),
        (
            child("reschedule", "2026-08-13T12:34:56Z"),
            (),
            {"outcome": "reschedule", "reschedule_at": "2026-08-13T12:34:56Z"},
        ),
        (
            ("no-such-program",),
            (),
            {
                "outcome": "failed",
                "exit_code": 127,
                "failure_kind": "application",
                "reason": "CommandNotFound: no-such-program: No such file or directory",
            },
        ),
    ],
    ids=["success", "failed", "timeout", "reschedule", "not-found"],
)
def test_the_report_says_what_the_record_says(shim, task, options, report) -> None:
    with ControlPlane() as control:
        ended = shim.run(*task, options=control.options(*options))
    assert control.calls() == [("/rpc/report", {"attempt_id": "attempt-1", **report})]
    assert ended.record == {"v": 1, "attempt_id": "attempt-1", **report}
    (_, _, headers) = control.requests[0]
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers


def test_url_token_and_attempt_come_from_variables_too(shim, tmp_path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with ControlPlane() as control:
        env = {
            "PODSETTLE_REPORT_URL": control.url + "/settle/",
            "PODSETTLE_REPORT_TOKEN_FILE": str(token),
            "PODSETTLE_ATTEMPT_ID": "attempt-1",
        }
        ended = shim.run("/bin/true", env=env)
    assert ended.record == SUCCESS
    ((path, body, headers),) = control.requests
    assert (path, body) == ("/settle" + REPORT[0], REPORT[1])
    assert headers["Authorization"] == "Bearer secret"
    assert "secret" not in ended.err


def test_the_token_is_read_anew_for_each_attempt(shim, tmp_path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    with ControlPlane(503) as control:
        control.before_answer = lambda path: token.write_text("new") and None
        shim.run("/bin/true", options=control.options("--report-token-file", str(token)))
    assert [headers["Authorization"] for _, _, headers in control.requests] == [
        "Bearer old",
        "Bearer new",
    ]


@pytest.mark.parametrize("answer", [500, 502, 503, 429, "drop"])
def test_a_report_is_tried_again_until_it_is_accepted(shim, answer) -> None:
    with ControlPlane(answer, answer) as control:
        ended = shim.run("/bin/true", options=control.options())
    assert control.calls() == [REPORT] * 3
    assert (ended.code, ended.record) == (0, SUCCESS)
    assert "report not delivered yet" in ended.err


@pytest.mark.parametrize("answer", [400, 401, 403, 404, 409, 307])
def test_a_refused_report_is_logged_and_not_tried_again(shim, answer) -> None:
    with ControlPlane(answer) as control:
        ended = shim.run("/bin/sh", "-c", "exit 3", options=control.options())
    assert len(control.requests) == 1
    assert (ended.code, ended.record) == (
        3,
        {"v": 1, "outcome": "failed", "exit_code": 3, "attempt_id": "attempt-1"},
    )
    # The server's own words help, on the one line that is ours.
    assert f"report not delivered: HTTP {answer}" in ended.err
    assert f'"answer\\n{answer}"' in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("answer", ["hang", "drip"])
def test_a_slow_server_holds_the_pod_no_longer_than_the_deadline(shim, answer) -> None:
    with ControlPlane(*[answer] * 20) as control:
        ended = shim.run("/bin/true", options=control.options("--report-deadline", "1.5"))
        assert (ended.code, ended.record) == (0, SUCCESS)
    assert "report not delivered: no answer within" in ended.err


def test_a_server_that_is_down_loses_the_report_and_nothing_else(shim) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        options = ("--report-url", url, "--attempt-id", "attempt-1", "--report-deadline", "1")
        ended = shim.run("/bin/sh", "-c", "exit 9", options=options)
    assert ended.code == 9
    assert ended.record is not None
    assert ended.record["exit_code"] == 9
    assert "Connection refused" in ended.err


def test_a_server_that_comes_back_gets_the_report(shim) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        options = ("--report-url", f"http://127.0.0.1:{port}", "--attempt-id", "attempt-1")
        running = shim.start("/bin/true", options=options)
        # The first refusal is said; only then does the server start to listen.
        assert "Connection refused" in running.process.stderr.readline()
        closed.listen()
        connection, _ = closed.accept()
        with connection:
            text = connection.recv(65536)
            assert text.startswith(b"POST /rpc/report HTTP/1.1\r\n")
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert running.end().record == SUCCESS


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:notaport", "cannot be sent"),
        ("http://", "names no host"),
        ("http://no-such-host.invalid", "report not delivered"),
    ],
)
def test_a_url_that_leads_nowhere_is_only_said(shim, url, said) -> None:
    options = ("--report-url", url, "--attempt-id", "attempt-1", "--report-deadline", "0.5")
    ended = shim.run("/bin/true", options=options)
    assert (ended.code, ended.record) == (0, SUCCESS)
    assert said in ended.err


def test_a_token_file_that_is_missing_is_only_said(shim, tmp_path) -> None:
    missing = tmp_path / "missing"
    with ControlPlane() as control:
        more = ("--report-token-file", str(missing), "--report-deadline", "0.5")
        ended = shim.run("/bin/true", options=control.options(*more))
    assert (ended.code, ended.record, control.requests) == (0, SUCCESS, [])
    assert str(missing) in ended.err


def test_no_report_after_a_stop_from_outside(shim) -> None:
    with ControlPlane() as control:
        running = shim.start(*child("finish", "0"), options=control.options())
        assert running.line() == "ready"
        running.signal(signal.SIGTERM)
        ended = running.end()
    assert (ended.code, ended.message, control.requests) == (0, "", [])


def test_a_stop_while_the_report_is_retried_allows_one_more_attempt(shim) -> None:
    with ControlPlane(*[503] * 1000) as control:
        running = shim.start(
            "/bin/sh", "-c", "exit 5", options=control.options("--report-deadline", "3600")
        )
        for _ in range(3):
            control.wait_for_request()
        running.signal(signal.SIGTERM)
        ended = running.end()
    assert ended.code == 5
    assert ended.record is not None
    assert ended.record["exit_code"] == 5
    assert "report not delivered: HTTP 503" in ended.err


def test_the_record_is_written_before_the_report_is_sent(shim) -> None:
    seen = []
    with ControlPlane(500) as control:
        control.before_answer = lambda path: seen.append(shim.record_path.read_text())
        ended = shim.run("/bin/true", options=control.options())
    assert seen == [ended.message] * 2
    assert ended.record == SUCCESS


def test_pushes_are_accepted_before_the_record_is_written(shim) -> None:
    seen = []
    with ControlPlane(500) as control:
        control.before_answer = lambda path: seen.append((path, shim.record_path.read_text()))
        ended = shim.run(
            *child("push", "return_value.json=[1, {}]", "link=http://x/", ".draft=no"),
            options=control.options(),
        )
    assert control.calls() == [
        ("/rpc/push", {"attempt_id": "attempt-1", "key": "link", "value": "http://x/"}),
        ("/rpc/push", {"attempt_id": "attempt-1", "key": "link", "value": "http://x/"}),
        ("/rpc/push", {"attempt_id": "attempt-1", "key": "return_value", "value": [1, {}]}),
        REPORT,
    ]
    assert [record for path, record in seen if path == "/rpc/push"] == ["", "", ""]
    assert (ended.code, ended.record) == (0, SUCCESS)


@pytest.mark.parametrize(
    ("answers", "detail"),
    [
        ([404], 'x: HTTP 404 Not Found: {"message": "answer\\n404"}'),
        ([401], 'x: HTTP 401 Unauthorized: {"message": "answer\\n401"}'),
        ([503] * 100, "x: HTTP 503 Service Unavailable"),
        (["drop"] * 100, "x: no valid answer: RemoteDisconnected"),
        (["hang"] * 100, "x: no answer within 1 s"),
    ],
    ids=["404", "401", "503", "drop", "hang"],
)
def test_a_push_that_stays_undelivered_is_a_failure_of_its_own(shim, answers, detail) -> None:
    with ControlPlane(*answers) as control:
        control.before_answer = lambda path: control.answers.clear() if "report" in path else None
        more = ("--report-deadline", "1")
        ended = shim.run(*child("push", "x=1"), options=control.options(*more))
    assert ended.code == 69
    assert ended.record == undelivered(detail)
    assert "push not delivered" in ended.err


@pytest.mark.parametrize(
    ("word", "detail"),
    [
        ("x.json={", "x.json: "),
        ("x.json=NaN", "x.json: "),
        ("x.json=" + "[" * 200000, "x.json: "),
    ],
    ids=["half", "nan", "deep"],
)
def test_a_push_that_is_no_json_is_not_delivered(shim, word, detail) -> None:
    # A file is longer than an argument may be.
    name, _, content = word.partition("=")
    script = f'printf "%s" "$(cat)" > "$PODSETTLE_PUSH_DIR/{name}"'
    with ControlPlane() as control:
        running = shim.start("/bin/sh", "-c", script, options=control.options(), stdin=-1)
        running.process.stdin.write(content)
        running.process.stdin.close()
        running.process.stdin = None
        ended = running.end()
    assert ended.code == 69
    assert ended.record is not None
    assert ended.record["reason"].startswith("OutputUndelivered: " + detail)
    assert [path for path, _ in control.calls()] == ["/rpc/report"]


@pytest.mark.parametrize(
    "script",
    [
        'printf "\\377" > "$PODSETTLE_PUSH_DIR/x"',
        'mkdir "$PODSETTLE_PUSH_DIR/x"',
        'mkfifo "$PODSETTLE_PUSH_DIR/x"',
        'ln -s /etc/passwd "$PODSETTLE_PUSH_DIR/x"',
        'rmdir "$PODSETTLE_PUSH_DIR"',
    ],
)
def test_a_push_that_is_no_text_file_is_not_delivered(shim, script) -> None:
    with ControlPlane() as control:
        ended = shim.run("/bin/sh", "-c", script, options=control.options())
    assert ended.code == 69
    assert ended.record is not None
    assert ended.record["reason"].startswith("OutputUndelivered: ")


@pytest.mark.parametrize("code", [1, 75])
def test_a_failed_task_pushes_nothing(shim, code) -> None:
    script = f'echo 1 > "$PODSETTLE_PUSH_DIR/x"; exit {code}'
    with ControlPlane() as control:
        ended = shim.run("/bin/sh", "-c", script, options=control.options())
    assert ended.code == code
    assert [path for path, _ in control.calls()] == ["/rpc/report"]


def test_a_stop_while_pushes_are_retried_does_not_lose_the_success(shim) -> None:
    with ControlPlane(503, 503) as control:
        running = shim.start(*child("push", "x=1"), options=control.options())
        control.wait_for_request()
        running.signal(signal.SIGTERM)
        ended = running.end()
    assert (ended.code, ended.record) == (0, SUCCESS)


def test_no_push_folder_without_a_receiver(shim) -> None:
    ended = shim.run("/usr/bin/env")
    assert "PODSETTLE_PUSH_DIR" not in ended.out
    assert "PODSETTLE_RESCHEDULE_FILE" in ended.out


@needs("openssl")
def test_https_with_a_certificate_of_ones_own(shim, tmp_path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with ControlPlane(context=context) as control:
        short = ("--report-deadline", "2.5")
        unknown = shim.run("/bin/true", options=control.options(*short))
        assert "certificate verify failed" in unknown.err
        assert control.calls() == []
        trusted = shim.run(
            "/bin/true", options=control.options("--report-ca", str(tmp_path / "cert.pem"))
        )
        assert control.calls() == [REPORT]
    assert unknown.record == trusted.record == SUCCESS


def test_retries_wait_longer_each_time_up_to_a_limit(shim) -> None:
    times = []
    with ControlPlane(*[503] * 6) as control:
        control.before_answer = lambda path: times.append(dt.datetime.now(dt.UTC))
        running = shim.start("/bin/true", options=control.options())
        while len(times) < 5:
            control.wait_for_request()
        waits = [(b - a).total_seconds() for a, b in itertools.pairwise(times)]
        running.signal(signal.SIGTERM)
        running.end()
    # Half of each delay is random; never less than half, so the fourth is above the first's most.
    assert waits[0] >= 0.25
    assert waits[1] >= 0.5
    assert waits[2] >= 1.0
    assert waits[3] >= 2.0
