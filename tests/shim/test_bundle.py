"""The bundle, installed into a folder and run where there is neither a shell nor a Python."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.packing.bundle import make_bundle
from tests.needs import needs
from tests.shim.harness import PATIENCE, ControlPlane, Shim, alive
from tests.shim.record_table import CASES
from tests.shim.test_processes import AS_PID_1
from tests.shim.test_record import check

SUCCESS = {"v": 1, "outcome": "success"}
pytestmark = needs("cc", "openssl", "setpriv", "unshare")
CHROOT = ("chroot",) if os.geteuid() == 0 else ("unshare", "--map-root-user", "chroot")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    make_bundle(path)
    return path


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "program"
    source = Path(__file__).with_name("program.c")
    subprocess.run(["cc", "-static", "-o", str(path), str(source)], check=True)
    return path


class Image(Shim):
    """A root file system with one program, one record file and one folder with the installed shim.

    Nothing else: no shell, no Python, no /proc, no /tmp, no libraries.
    """

    def __init__(self, folder: Path, bundle: Path, program: Path) -> None:
        super().__init__([], folder)
        self.root = folder / "root"
        (self.root / "dev").mkdir(parents=True)
        shutil.copy(program, self.root / "program")
        self.record_path = self.root / "dev" / "termination-log"
        self.record_path.touch()
        # As the init container does it: from an image that holds the bundle only.
        source = folder / "source"
        shutil.copytree(bundle, source)
        (source / "podsettle").mkdir()
        copied = subprocess.run(
            [*CHROOT, str(source), "/agent-shim", "install", "/podsettle"],
            check=False,
            capture_output=True,
            text=True,
        )
        assert (copied.returncode, copied.stdout, copied.stderr) == (0, "", "")
        (source / "podsettle").rename(self.root / "podsettle")
        self.prefix = [*CHROOT, str(self.root), "/podsettle/agent-shim"]


@pytest.fixture
def image(tmp_path: Path, bundle: Path, program: Path) -> Iterator[Image]:
    made = Image(tmp_path, bundle, program)
    yield made
    made.close()


def test_the_installed_bundle_is_the_bundle(image: Image, bundle: Path) -> None:
    def listing(root: Path) -> dict[str, tuple[bytes, bool]]:
        return {
            str(path.relative_to(root)): (path.read_bytes(), os.access(path, os.X_OK))
            for path in root.rglob("*")
            if path.is_file()
        }

    assert listing(image.root / "podsettle") == listing(bundle)
    for path in (image.root / "podsettle").rglob("*"):
        # Readable for the user of another container, whatever the umask was.
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path


@pytest.mark.parametrize(
    ("words", "code", "record"),
    [
        (("exit", "0"), 0, SUCCESS),
        (("exit", "3"), 3, {"v": 1, "outcome": "failed", "exit_code": 3}),
        (("kill", "11"), 139, {"v": 1, "outcome": "failed", "exit_code": 139}),
    ],
)
def test_a_task_in_an_empty_image(image: Image, words, code, record) -> None:
    # The default path, which the shim opens only where the kubelet made the file.
    running = image.start_words([*image.prefix, "run", "--", "/program", *words])
    ended = running.end()
    assert (ended.code, ended.record) == (code, record)
    assert "no folder for PODSETTLE_RESCHEDULE_FILE" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bundle_gives_the_records_of_the_table(bundle: Path, tmp_path: Path, case) -> None:
    shim = Shim([str(bundle / "agent-shim")], tmp_path)
    try:
        check(shim, case)
    finally:
        shim.close()


def test_a_command_that_the_image_does_not_have(image: Image) -> None:
    ended = image.words("run", "--", "sh", "-c", "true")
    assert ended.code == 127
    assert ended.record is not None
    assert ended.record["reason"] == "CommandNotFound: sh: No such file or directory"


def test_reschedule_in_an_empty_image(image: Image) -> None:
    (image.root / "tmp").mkdir()
    ended = image.words("run", "--", "/program", "reschedule", "2026-08-13T12:34:56+00:00")
    assert (ended.code, ended.err) == (75, "")
    assert ended.record == {
        "v": 1,
        "outcome": "reschedule",
        "reschedule_at": "2026-08-13T12:34:56Z",
    }


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_push_and_report_from_an_empty_image(image: Image, secure: bool) -> None:
    (image.root / "drafts").mkdir()
    context = None
    more: tuple[str, ...] = ("--work-dir", "/drafts")
    if secure:
        make_certificate(image.root)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(image.root / "cert.pem", image.root / "key.pem")
        more = (*more, "--report-ca", "/cert.pem")
    with ControlPlane(context=context) as control:
        if secure:
            # By name, which needs the codec for host names and the resolver.
            (image.root / "etc").mkdir()
            (image.root / "etc" / "hosts").write_text("127.0.0.1 control\n")
            control.url = f"https://control:{control.port}"
        ended = image.words("run", *control.options(*more), "--", "/program", "push", '{"a": 1}')
    assert (ended.code, ended.err) == (0, "")
    assert control.calls() == [
        ("/rpc/push", {"attempt_id": "attempt-1", "key": "return_value", "value": {"a": 1}}),
        ("/rpc/report", {"attempt_id": "attempt-1", "outcome": "success"}),
    ]
    assert ended.record == {**SUCCESS, "attempt_id": "attempt-1"}


def make_certificate(folder: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2"),
            *("-subj", "/CN=control", "-addext", "subjectAltName=DNS:control"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def test_a_stop_from_outside_in_an_empty_image(image: Image) -> None:
    running = image.start_words([*image.prefix, "run", "--", "/program", "wait"])
    assert running.line() == "ready"
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.message) == (0, "")


def test_the_environment_of_the_image_reaches_the_task_and_not_the_shim(image: Image) -> None:
    # Names that would stop the shim's own loader or Python, were they to reach them.
    env = {
        "LD_PRELOAD": "/no/such.so",
        "LD_LIBRARY_PATH": "/no/such",
        "PYTHONHOME": "/no/such",
        "LC_ALL": "de_DE.UTF-8",
    }
    image.environment = {"PATH": os.environ["PATH"]}
    (image.root / "tmp").mkdir()
    done = image.words("run", "--", "/program", "environment", env={"PYTHONHOME": "/no"})
    assert done.code == 0
    assert "PYTHONHOME=/no" in done.out.splitlines()

    # Not through chroot, whose own loader would read them: in place.
    image.environment = {}
    launcher = str(image.root / "podsettle" / "agent-shim")
    program = str(image.root / "program")
    done = image.start_words(
        [launcher, "run", "--record", str(image.record_path), "--", program, "environment"],
        env=env,
    ).end()
    assert (done.code, done.err) == (0, "")
    told = [line for line in done.out.splitlines() if "PODSETTLE_RESCHEDULE_FILE" not in line]
    assert sorted(told) == sorted(f"{name}={value}" for name, value in env.items())


def test_as_pid_1_and_a_user_with_no_rights(image: Image) -> None:
    # Nothing but the record's file, which the kubelet makes writable for all, and /tmp.
    assert os.geteuid() == 0, "run as root: another user's rights cannot be tried otherwise"
    image.record_path.chmod(0o666)
    (image.root / "tmp").mkdir()
    (image.root / "tmp").chmod(0o1777)
    for words, code, record in (
        (("exit", "3"), 3, {"v": 1, "outcome": "failed", "exit_code": 3}),
        (
            ("reschedule", "2026-08-13T12:34:56Z"),
            75,
            {"v": 1, "outcome": "reschedule", "reschedule_at": "2026-08-13T12:34:56Z"},
        ),
    ):
        ended = image.start_words(
            [
                *(*AS_PID_1, "setpriv", "--no-new-privs"),
                *("chroot", "--userspec=65532:65532", str(image.root)),
                *("/podsettle/agent-shim", "run", "--", "/program", *words),
            ]
        ).end()
        assert (ended.code, ended.err, ended.record) == (code, "", record)
    assert list((image.root / "tmp").iterdir()) == []


def test_orphans_become_children_of_the_shim_and_are_ended(image: Image) -> None:
    # Not as PID 1: the launcher makes the shim their reaper.
    launcher = str(image.root / "podsettle" / "agent-shim")
    program = str(image.root / "program")
    ended = image.start_words(
        [launcher, "run", "--record", str(image.record_path), "--", program, "daemon"]
    ).end()
    assert not alive(int(ended.out))
    assert (ended.code, ended.record) == (0, SUCCESS)


def test_as_pid_1_it_misses_no_signal_from_its_first_moment_on(image: Image) -> None:
    # The launcher blocks signals before Python starts; PID 1 would lose one that came earlier.
    launcher = str(image.root / "podsettle" / "agent-shim")
    program = str(image.root / "program")
    script = '(kill -TERM 1); exec "$@"'
    blocked = (sys.executable, "-c", BLOCK_AND_RUN, "/bin/sh", "-c", script, "sh")
    ended = image.start_words(
        [
            *AS_PID_1,
            *blocked,
            *(launcher, "run", "--record", str(image.record_path), "--", program, "wait"),
        ]
    ).end()
    # 143 when it reaches the task before the task's handler is there.
    assert (ended.code, ended.message) in ((0, ""), (143, ""))


# A SIGTERM that waits from before the launcher starts, since nobody took it.
BLOCK_AND_RUN = (
    "import os, signal, sys;"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM});"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def test_it_may_be_installed_again_while_it_runs(image: Image, bundle: Path) -> None:
    running = image.start_words([*image.prefix, "run", "--", "/program", "wait"])
    assert running.line() == "ready"
    again = subprocess.run(
        [str(bundle / "agent-shim"), "install", str(image.root / "podsettle")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (again.returncode, again.stderr) == (0, "")
    assert list((image.root / "podsettle").rglob("*.new")) == []
    running.signal(signal.SIGTERM)
    assert running.end().code == 0


def test_install_from_the_one_file_and_from_the_package(one_file_path: Path, tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    python = [sys.executable, "-I", "-S"]
    subprocess.run([*python, str(one_file_path), "install", str(first)], check=True)
    assert [path.name for path in first.iterdir()] == ["agent-shim.pyz"]
    subprocess.run([sys.executable, "-m", "agent_shim", "install", str(second)], check=True)
    for folder in (first, second):
        path = folder / "agent-shim.pyz"
        assert path.read_bytes() == one_file_path.read_bytes()
        shown = subprocess.run([str(path), "--version"], check=True, capture_output=True, text=True)
        assert shown.stdout.startswith("agent-shim ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 64, "install takes one folder"),
        (("--help",), 64, "install takes one folder"),
        (("/no/such/folder",), 1, "cannot install /no/such/folder: No such file or directory"),
        (("/proc",), 1, "cannot install /proc/"),
    ],
)
def test_an_install_that_cannot_be_done_says_why(shim, words, code, said) -> None:
    ended = shim.words("install", *words)
    assert ended.code == code
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_make_shim_says_what_is_missing(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent_shim.packing", str(tmp_path / "out")],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "CC": "no-such-compiler"},
    )
    assert done.returncode == 1
    assert "needs a C compiler and no-such-compiler is not installed" in done.stderr
