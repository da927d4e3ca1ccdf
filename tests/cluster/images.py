"""Builds the container images of the tests from Debian packages and this checkout; nothing is pulled.

Images, all under localhost/podsettle: `pause` holds a pod's namespaces, `task` has Python, a shell and the agent shim,
`task-noshell` has Python and the shim and not one other program, `reconciler` is laid out as k8s/image/Dockerfile does.
Root file systems and third-party wheels are kept in the cache; what comes from this checkout is packed anew each time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from build import cache

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
PREFIX = "localhost/podsettle"
PACKAGES = ("python3",)
DROPPED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)


class Layer:
    """One layer of an image: an uncompressed tar file, known by its digest."""

    def __init__(self, path: Path) -> None:
        """Read a tar file's digest, from a note beside it where there is one."""
        self.path = path
        self.size = path.stat().st_size
        note = path.with_suffix(".sha256")
        if not note.exists():
            with path.open("rb") as file:
                note.write_text(hashlib.file_digest(file, "sha256").hexdigest())
        self.digest = note.read_text()


def archive(target: Path, *, work: Path, names: tuple[str, ...]) -> None:
    """Write one OCI archive that holds the named images, each shared layer once."""
    images = {name: _IMAGES[name](work) for name in names}
    blobs: dict[str, tuple[int, bytes | Path]] = {}
    index = []
    for name, (layers, config) in images.items():
        document = {
            "architecture": _architecture(),
            "os": "linux",
            "config": config,
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{layer.digest}" for layer in layers],
            },
        }
        config_blob = _blob(blobs, "application/vnd.oci.image.config.v1+json", document)
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config_blob,
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": f"sha256:{layer.digest}",
                    "size": layer.size,
                }
                for layer in layers
            ],
        }
        for layer in layers:
            blobs[layer.digest] = (layer.size, layer.path)
        entry = _blob(blobs, "application/vnd.oci.image.manifest.v1+json", manifest)
        entry["annotations"] = {
            "io.containerd.image.name": f"{PREFIX}/{name}:test",
            "org.opencontainers.image.ref.name": "test",
        }
        index.append(entry)
    with tarfile.open(target, "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        for digest, (_, content) in blobs.items():
            if isinstance(content, Path):
                tar.add(content, f"blobs/sha256/{digest}")
            else:
                _add(tar, f"blobs/sha256/{digest}", content)
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": index}).encode())


def _pause(work: Path) -> tuple[list[Layer], dict[str, Any]]:
    tree = work / "pause"
    tree.mkdir()
    source = HERE / "pause" / "pause.c"
    subprocess.run(["gcc", "-static", "-Os", "-o", tree / "pause", source], check=True)
    return [_pack(tree, work / "pause.tar")], {"Entrypoint": ["/pause"], "User": "65535:65535"}


def _task(work: Path) -> tuple[list[Layer], dict[str, Any]]:
    return [Layer(_debian()), _shim(work)], _config(PYTHONPATH="/opt/shim")


def _task_without_shell(work: Path) -> tuple[list[Layer], dict[str, Any]]:
    return [Layer(_only_python()), _shim(work)], _config(PYTHONPATH="/opt/shim")


def _reconciler(work: Path) -> tuple[list[Layer], dict[str, Any]]:
    dependencies = Layer(_wheels())
    tree = work / "reconciler"
    wheels = work / "wheels"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
    )
    _pip_install(tree / "opt/podsettle", "--no-deps", *map(str, wheels.glob("*.whl")))
    script = tree / "opt/podsettle/bin/podsettle"
    script.write_text(
        "#!/usr/bin/python3\nimport sys\n\nfrom reconciler.cli import main\n\nsys.exit(main())\n"
    )
    _compile(tree)
    config = _config(PYTHONPATH="/opt/podsettle", PATH="/opt/podsettle/bin:/usr/bin:/bin")
    config |= {"User": "65532:65532", "Entrypoint": ["podsettle"]}
    return [Layer(_debian()), dependencies, _pack(tree, work / "reconciler.tar")], config


_IMAGES = {
    "pause": _pause,
    "task": _task,
    "task-noshell": _task_without_shell,
    "reconciler": _reconciler,
}


def _config(**environment: str) -> dict[str, Any]:
    variables = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    } | environment
    return {"Env": [f"{name}={value}" for name, value in variables.items()], "WorkingDir": "/"}


def _shim(work: Path) -> Layer:
    tar = work / "shim.tar"
    if not tar.exists():
        tree = work / "shim"
        shutil.copytree(
            CHECKOUT / "agent_shim",
            tree / "opt/shim/agent_shim",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        _pack(tree, tar)
    return Layer(tar)


def _pack(tree: Path, target: Path) -> Layer:
    subprocess.run(
        [
            *(
                "tar",
                "-C",
                tree,
                "--create",
                "--file",
                target,
                "--numeric-owner",
                "--sort=name",
            ),
            *("--owner=0", "--group=0", "--mode=u+rw,go+r,go-w,a+X", "."),
        ],
        check=True,
    )
    return Layer(target)


def _debian() -> Path:
    """Return a minimal Debian with Python, as a tar file."""
    repository, suite = _repository()
    target = _cached("debian", repository, suite, *PACKAGES, *DROPPED)
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="podsettle-debian-", dir=target.parent) as scratch:
            root = Path(scratch) / "root"
            with target.with_suffix(".log").open("w") as log:
                subprocess.run(
                    [
                        *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
                        *(suite, root, repository),
                    ],
                    check=True,
                    stdout=log,
                    stderr=log,
                )
            for name in DROPPED:
                shutil.rmtree(root / name, ignore_errors=True)
            for name in ("proc", "sys", "dev"):
                subprocess.run(
                    ["umount", "--lazy", root / name], check=False, stderr=subprocess.DEVNULL
                )
            part = Path(scratch) / "part.tar"
            subprocess.run(
                [
                    *(
                        "tar",
                        "-C",
                        root,
                        "--create",
                        "--file",
                        part,
                        "--numeric-owner",
                        "--sort=name",
                    ),
                    *("--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*", "."),
                ],
                check=True,
            )
            _keep(part, target)
    return target


def _only_python() -> Path:
    """Return Python, its libraries and nothing else that could be executed, as a tar file."""
    debian = _debian()
    target = _cached("python", "2", debian.name)
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="podsettle-python-", dir=target.parent) as scratch:
            root, tree = Path(scratch) / "root", Path(scratch) / "tree"
            root.mkdir()
            subprocess.run(["tar", "-C", root, "--extract", "--file", debian], check=True)
            python = (root / "usr/bin/python3").readlink().name
            modules = sorted((root / "usr/lib" / python / "lib-dynload").glob("*.so"))
            found = subprocess.run(
                [
                    "chroot",
                    root,
                    "ldd",
                    f"/usr/bin/{python}",
                    *(f"/{path.relative_to(root)}" for path in modules),
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            libraries = {
                word for word in found.split() if word.startswith("/") and not word.endswith(":")
            }
            for name in sorted(libraries | {f"/usr/bin/{python}"}):
                _copy_following(root, tree, name)
            shutil.copytree(root / "usr/lib" / python, tree / "usr/lib" / python, symlinks=True)
            (tree / "usr/bin/python3").symlink_to(python)
            for name in ("tmp", "proc", "sys", "dev", "etc"):
                (tree / name).mkdir(exist_ok=True)
            _keep(_pack(tree, Path(scratch) / "part.tar").path, target)
    return target


def _copy_following(root: Path, tree: Path, name: str) -> None:
    """Copy a file and every link on the way to it; /lib and /lib64 are folders of the copy, not links."""
    source = root / name.lstrip("/")
    real = Path(os.path.realpath(source)) if not source.is_symlink() else _inside(root, source)
    copy = tree / name.lstrip("/")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(real, copy)


def _inside(root: Path, path: Path) -> Path:
    while path.is_symlink():
        link = path.readlink()
        path = root / str(link).lstrip("/") if link.is_absolute() else path.parent / link
    return path


def _wheels() -> Path:
    """Return the reconciler's dependencies for the Python of the image, as a tar file."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    target = _cached("wheels", "compiled", _debian().name, *project["dependencies"])
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="podsettle-wheels-", dir=target.parent) as scratch:
            tree = Path(scratch) / "tree"
            _pip_install(tree / "opt/podsettle", *project["dependencies"])
            shutil.rmtree(tree / "opt/podsettle/bin", ignore_errors=True)
            _compile(tree)
            _keep(_pack(tree, Path(scratch) / "part.tar").path, target)
    return target


def _keep(part: Path, target: Path) -> None:
    """Move a finished layer into the cache; a note about an earlier one of that name is void."""
    target.with_suffix(".sha256").unlink(missing_ok=True)
    part.rename(target)


def _pip_install(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "--quiet",
                "install",
                "--target",
                folder,
                "--no-compile",
            ),
            *("--only-binary=:all:", "--python-version", _python_version(), *arguments),
        ],
        check=True,
    )


def _compile(tree: Path) -> None:
    """Compile the modules, as the Dockerfile's pip does: a pass would else do it each time it starts."""
    if _python_version() == f"{sys.version_info.major}.{sys.version_info.minor}":
        subprocess.run(
            [
                *(sys.executable, "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash"),
                *("-s", tree, "-p", "/", tree / "opt/podsettle"),
            ],
            check=True,
        )


def _python_version() -> str:
    with tarfile.open(_debian()) as tar:
        return tar.getmember("./usr/bin/python3").linkname.removeprefix("python")


def _repository() -> tuple[str, str]:
    """Ask apt where this machine's Debian packages come from."""
    lines = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for line in lines:
        uri, release, component = line.split()
        if component == "main" and "-" not in release:
            return uri, release
    raise RuntimeError(f"apt names no main component of a Debian release: {lines}")


def _cached(kind: str, *inputs: str) -> Path:
    folder = cache() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{hashlib.sha256(' '.join(inputs).encode()).hexdigest()[:12]}.tar"


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def _blob(blobs: dict[str, Any], media_type: str, document: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = (len(content), content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
