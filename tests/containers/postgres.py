"""PostgreSQL 15 in a container, and PgBouncer in front of any server, for the tests.

The engine and the image come from `.ci/engine start` and `tests/containers/build-image`; nothing
here pulls one. So testcontainers' reaper, an image too, is off, and what a killed run leaves behind
goes with `docker rm -f $(docker ps -aq --filter label=podsettle.test)`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT_IMAGE = "podsettle-test-postgres:15"


def image() -> str:
    """The name of the image that the tests run."""
    return os.environ.get("PODSETTLE_TEST_IMAGE") or DEFAULT_IMAGE


def why_no_containers() -> str | None:
    """What keeps the tests from starting a container, as a sentence; None if nothing does."""
    try:
        import docker
        from docker.errors import DockerException, ImageNotFound
        from requests.exceptions import RequestException
    except ImportError as error:
        return f"the Python package {error.name} is not installed"
    try:
        # docker's own client leaves a socket open if it cannot connect, and pytest fails for that.
        host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if host.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(10)
                probe.connect(host.removeprefix("unix://"))
        with closing(docker.from_env(timeout=10)) as client:
            client.images.get(image())
    except ImageNotFound:
        return f"the Docker engine has no image {image()} (tests/containers/build-image)"
    except (DockerException, RequestException, OSError) as error:
        return f"no Docker engine answers (.ci/engine start): {error}"
    return None


def docker_engine_answers() -> bool:
    """Whether an engine answers and has the image, so that `start_container_postgres` can work."""
    return why_no_containers() is None


@contextmanager
def start_container_postgres() -> Iterator[str]:
    """Run PostgreSQL 15 in a container of its own; the DSN is a superuser's."""
    from testcontainers.community.postgres import PostgresContainer
    from testcontainers.core.config import testcontainers_config

    testcontainers_config.ryuk_disabled = True
    container = PostgresContainer(
        image=image(), username="test", password="test", dbname="test", driver=None
    )
    # A test's data need not outlive its server: no disk is waited for.
    container.with_command("-c fsync=off -c full_page_writes=off -c max_connections=200")
    run = os.environ.get("TEST_RUN_LABEL") or "by-hand"
    container.with_kwargs(labels={"podsettle.test": run})
    with container:
        yield container.get_connection_url()


@contextmanager
def start_pgbouncer(dsn: str, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Put PgBouncer in transaction mode before the server of `dsn`, and give the DSN through it.

    Every client is the user of `dsn`, whatever the database. No startup parameter is ignored, which
    is the default: a client that sends `options` is refused. `settings` are further lines of its
    [pgbouncer] section.
    """
    program = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        raise RuntimeError("there is no pgbouncer on this machine: apt-get install pgbouncer")
    server = conninfo_to_dict(dsn)
    user = str(server.get("user") or "postgres")
    # It refuses to run as root, and leaves files behind that it then cannot write as another.
    nobody = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    with tempfile.TemporaryDirectory(prefix="podsettle-pgbouncer-") as folder:
        port = _free_port()
        config = Path(folder, "pgbouncer.ini")
        users = Path(folder, "users.txt")
        log = Path(folder, "log")
        target = {
            "host": server.get("host") or server.get("hostaddr") or "127.0.0.1",
            "port": server.get("port") or "5432",
            "user": user,
            "password": server.get("password"),
        }
        lines = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": str(users),
            "admin_users": user,
            "pool_mode": "transaction",
            "default_pool_size": "5",
            **(settings or {}),
        }
        config.write_text(
            "[databases]\n* = "
            + " ".join(f"{key}={_quoted(str(value))}" for key, value in target.items() if value)
            + "\n[pgbouncer]\n"
            + "".join(f"{key} = {value}\n" for key, value in lines.items())
        )
        users.write_text('"{}" ""\n'.format(user.replace('"', '""')))
        if nobody is not None:
            for path in (Path(folder), config, users):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [program, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                user=nobody.pw_uid if nobody else None,
                group=nobody.pw_gid if nobody else None,
                extra_groups=[] if nobody else None,
            ) as process,
        ):
            through = make_conninfo(
                host="127.0.0.1",
                port=port,
                user=user,
                dbname=server.get("dbname") or user,
                # libpq asks for GSS and TLS first, which costs a round trip each.
                sslmode="disable",
                gssencmode="disable",
            )
            try:
                _wait_for_pgbouncer(process, through, log)
                yield through
            finally:
                process.terminate()
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait_for_pgbouncer(process: subprocess.Popen[bytes], dsn: str, log: Path) -> None:
    """Return once a query goes through it; its return code and its port alone prove nothing."""
    deadline = time.monotonic() + 15
    while True:
        problem: object = f"pgbouncer ended with {process.poll()}"
        if process.poll() is None:
            try:
                with psycopg.connect(dsn, connect_timeout=5, autocommit=True) as connection:
                    connection.execute("select 1")
            except psycopg.OperationalError as error:
                problem = error
            else:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")
            raise RuntimeError(f"pgbouncer is of no use here: {problem}\n{said}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
