"""Options and variables, and that nothing about the record ever stands in the task's way."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import agent_shim
from tests.needs import needs
from tests.shim.harness import CHILD, Shim, child

PACKAGE = Path(agent_shim.__file__).parent
SUCCESS = {"v": 1, "outcome": "success"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nonsense", "1", "--", "true"), "unknown option '--nonsense'"),
        (("-x", "--", "true"), "unknown option '-x'"),
        (("--timeout",), "--timeout needs a value"),
        (("--timeout", "0", "--", "true"), "--timeout: '0' is not usable; give seconds above 0"),
        (("--timeout", "nan", "--", "true"), "'nan' is not usable"),
        (("--timeout", "inf", "--", "true"), "'inf' is not usable"),
        (("--timeout", "1e30", "--", "true"), "'1e30' is not usable"),
        (("--kill-grace=-1", "--", "true"), "'-1' is not usable"),
        (("--trust-exit-after-sigterm=perhaps", "--", "true"), "give true or false"),
        (("--stop-signal", "KILL", "--", "true"), "'KILL' is not usable"),
        (("--stop-signal", "NONE", "--", "true"), "a signal's name or number"),
        (("--report-url", "ftp://x", "--", "true"), "give http://HOST/PATH"),
        (("--report-url", "http://u:p@x", "--", "true"), "no user"),
        (("--report-url", "http://x", "--", "true"), "--report-url needs --attempt-id"),
        (("--attempt-id", "a b", "--", "true"), "printable ASCII"),
        (("--attempt-id", "a" * 201, "--", "true"), "printable ASCII"),
        (("--",), "no command; give one after --"),
        ((), "no command; give one after --"),
    ],
)
def test_a_wrong_call_says_what_is_wrong_and_runs_nothing(shim, words, said) -> None:
    ended = shim.words("run", "--record", str(shim.record_path), *words)
    assert ended.code == 64
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert ended.record is not None
    assert ended.record["exit_code"] == 64
    assert ended.record["reason"].startswith("ShimUsage: ")


def test_a_wrong_variable_is_named(shim) -> None:
    ended = shim.run("/bin/true", env={"PODSETTLE_TIMEOUT": "soon"})
    assert ended.code == 64
    assert "PODSETTLE_TIMEOUT: 'soon' is not usable" in ended.err


def test_the_command_line_wins_over_variables(shim) -> None:
    env = {"PODSETTLE_ATTEMPT_ID": "variable", "PODSETTLE_TIMEOUT": "0.05"}
    ended = shim.run("/bin/true", options=("--attempt-id=option", "--timeout=900"), env=env)
    assert ended.record == {**SUCCESS, "attempt_id": "option"}


def test_every_option_but_the_flag_is_read_from_its_variable(shim, tmp_path) -> None:
    record = tmp_path / "elsewhere"
    work = tmp_path / "work"
    work.mkdir()
    env = {
        "PODSETTLE_RECORD": str(record),
        "PODSETTLE_WORK_DIR": str(work),
        "PODSETTLE_ATTEMPT_ID": "a",
        "PODSETTLE_TIMEOUT": "2",
        "PODSETTLE_KILL_GRACE": "0",
    }
    script = "trap '' TERM; echo $PODSETTLE_RESCHEDULE_FILE; while :; do sleep 0.1; done"
    words = [*shim.prefix, "run", "--", "/bin/sh", "-c", script]
    ended = shim.start_words(words, env=env).end()
    assert ended.out.startswith(f"{work}/podsettle-")
    assert ended.code == 137
    assert json.loads(record.read_text()) == {
        "v": 1,
        "outcome": "failed",
        "exit_code": 137,
        "failure_kind": "timeout",
        "reason": "ExecutionTimeout",
        "attempt_id": "a",
    }


def test_an_empty_variable_is_no_variable(shim) -> None:
    env = {"PODSETTLE_TIMEOUT": "", "PODSETTLE_REPORT_URL": ""}
    assert shim.run("/bin/true", env=env).record == SUCCESS


@pytest.mark.parametrize("words", [("--", "/bin/echo", "--", "-x"), ("/bin/echo", "--", "-x")])
def test_the_command_is_passed_on_word_by_word(shim, words) -> None:
    ended = shim.words("run", "--record=none", *words)
    assert (ended.code, ended.out) == (0, "-- -x\n")


def test_no_shell_reads_the_command(shim) -> None:
    word = "$(id) `id` ; * > x \n \udcff"
    code = "import sys; print(ascii(sys.argv[1:]))"
    ended = shim.run(sys.executable, "-I", "-S", "-c", code, word, "")
    assert ended.out.strip() == ascii([word, ""])


def test_the_environment_reaches_the_task_as_it_was(shim) -> None:
    # Python adds LC_CTYPE where no locale is chosen; the launcher sets LD_* aside.
    for extra in ({}, {"LC_CTYPE": "C.UTF-8"}, {"PODSETTLE_KEEP_LD_X": "1"}):
        shim.environment = {"A": "\udcff", "PATH": "/usr/bin:/bin", **extra}
        ended = shim.run(sys.executable, "-I", "-S", str(CHILD), "environment")
        wanted = {name.removeprefix("PODSETTLE_KEEP_"): value for name, value in extra.items()}
        assert ended.out.split() == sorted(
            [
                ascii("A=\udcff"),
                ascii("PATH=/usr/bin:/bin"),
                *(ascii(f"{name}={value}") for name, value in wanted.items()),
            ]
        )


def test_help_and_version(shim) -> None:
    assert "agent-shim run [options] -- COMMAND" in shim.words("--help").out
    assert shim.words("run", "--help").out.startswith("usage: agent-shim run")
    assert shim.words("--version").out == f"agent-shim {agent_shim.__version__}\n"
    assert shim.words("stop").code == 64
    assert shim.words().out == shim.words("--help").out


def test_every_option_is_in_the_help_and_on_the_page(shim) -> None:
    from agent_shim.options import _TABLE

    told = shim.words("run", "--help").out
    assert [name for name in _TABLE if f"--{name} " not in told] == []
    page = (PACKAGE.parent / "docs" / "agent-shim.md").read_text()
    assert [name for name in _TABLE if f"| `--{name}" not in page] == []


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/dev/full", "No space left on device"),
        ("/proc/version", ""),
        ("/no/such/folder/log", "No such file or directory"),
        ("/etc", "Is a directory"),
        ("{folder}/fifo", "No such device or address"),
        ("none", None),
    ],
)
def test_a_record_that_cannot_be_written_changes_nothing(shim, tmp_path, path, said, code) -> None:
    os.mkfifo(tmp_path / "fifo")
    record = path.format(folder=tmp_path)
    ended = shim.run("/bin/sh", "-c", f"exit {code}", options=("--record", record))
    assert ended.code == code
    if said is None:
        assert ended.err == ""
    else:
        assert f"{record}: {said}" in ended.err
        assert len(ended.err.splitlines()) == 1


@needs("unshare")
def test_a_read_only_disk_changes_nothing(shim, tmp_path) -> None:
    # In a name space of its own the record's folder and every place to work are read-only.
    # Their content stays: the checkout and its Python may lie there.
    script = (
        f"for d in /tmp /var/tmp /dev/shm {tmp_path}; do"
        " mount --bind $d $d && mount -o remount,bind,ro $d || exit 99; done;"
        ' exec "$@"'
    )
    wrap = (
        "unshare",
        "--mount",
        *(() if os.geteuid() == 0 else ("-r",)),
        "/bin/sh",
        "-c",
        script,
        "sh",
    )
    shim.prefix = [sys.executable, "-c", "from agent_shim.__main__ import main; main()"]
    ended = shim.run(
        *("/bin/sh", "-c", "echo ${PODSETTLE_RESCHEDULE_FILE-none}; exit 4"),
        wrap=wrap,
        cwd=PACKAGE.parent,
        options=("--record", "/var/tmp/record"),
    )
    assert (ended.code, ended.out) == (4, "none\n")
    assert "no record: cannot open /var/tmp/record: Read-only file system" in ended.err
    assert "no folder for PODSETTLE_RESCHEDULE_FILE" in ended.err


def test_a_closed_standard_error_changes_nothing(shim) -> None:
    script = 'exec 2>&-; exec "$@"'
    ended = shim.run("no-such-program", wrap=("/bin/sh", "-c", script, "sh"))
    assert ended.code == 127
    assert ended.record is not None


def test_a_standard_error_that_nobody_reads_changes_nothing(shim) -> None:
    gate, end = os.pipe()
    os.close(gate)
    process = subprocess.Popen(
        [*shim.prefix, "run", "--record", str(shim.record_path), "--", "no-such-program"],
        stderr=end,
    )
    os.close(end)
    assert process.wait(120) == 127
    assert json.loads(shim.record_path.read_text())["exit_code"] == 127


def test_a_work_folder_that_is_missing_is_said(shim) -> None:
    ended = shim.run("/bin/sh", "-c", "exit 75", options=("--work-dir", "/no/such"))
    assert (ended.code, ended.record) == (75, {"v": 1, "outcome": "failed", "exit_code": 75})
    assert "cannot write in /no/such; name one with --work-dir" in ended.err


def test_the_installed_package_does_the_same(tmp_path: Path) -> None:
    shim = Shim([sys.executable, "-m", "agent_shim"], tmp_path)
    try:
        ended = shim.run("/bin/sh", "-c", "exit 3", cwd=PACKAGE.parent)
    finally:
        shim.close()
    assert (ended.code, ended.record) == (3, {"v": 1, "outcome": "failed", "exit_code": 3})


def test_the_shim_imports_the_standard_library_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top in sys.stdlib_module_names | {"agent_shim"}, f"{path}: {name}"


def test_a_run_without_a_report_loads_next_to_nothing(shim) -> None:
    python, *rest = shim.prefix
    shim.prefix = [python, "-X", "importtime", *rest]
    ended = shim.run("/bin/true")
    bare = subprocess.run(
        [python, "-I", "-S", "-X", "importtime", "-c", "pass"],
        check=True,
        capture_output=True,
        text=True,
    )
    more = loaded(ended.err) - loaded(bare.stderr)
    ours = {name for name in more if name.startswith("agent_shim")}
    assert ours == {
        f"agent_shim{name}"
        for name in ("", ".__main__", ".options", ".output", ".record", ".run", ".task", ".workdir")
    }
    # Built into the interpreter or one small extension: what unpacks the one file.
    assert more - ours <= {"errno", "time", "_signal", "binascii", "zlib"}


def loaded(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_another_python_runs_the_one_file_from_its_source(one_file_path, tmp_path) -> None:
    # The same file with another version's mark: the compiled part is then of no use.
    import importlib.util

    text = one_file_path.read_bytes()
    mark = repr(importlib.util.MAGIC_NUMBER).encode()
    assert text.count(mark) == 1
    other = tmp_path / "agent-shim.pyz"
    other.write_bytes(text.replace(mark, b"b'another'"))
    shim = Shim([sys.executable, "-I", "-S", str(other)], tmp_path)
    try:
        ended = shim.run(*child("reschedule", "2026-08-13T12:34:56Z"))
    finally:
        shim.close()
    assert ended.record == {
        "v": 1,
        "outcome": "reschedule",
        "reschedule_at": "2026-08-13T12:34:56Z",
    }
