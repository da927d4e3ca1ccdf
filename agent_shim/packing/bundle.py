"""The shim as a folder that brings its own Python, loader and libraries: for any Linux image.

    agent-shim                 static launcher, the command
    agent-shim.pyz             the one file, for images that have a Python
    runtime/agent-shim.pyc     the shim, compiled for the Python beside it
    runtime/bin/python3        the interpreter that made the bundle
    runtime/lib/               loader and shared libraries
    runtime/lib/pythonX.Y/     the modules that the shim loads, compiled, and their extensions

Nothing is unpacked at start, so that no writable /tmp is needed (facts/containers.md section 4).
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from agent_shim.packing.onefile import bytecode, compile_module, one_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Loaded by name at run time: host names are encoded with idna, and a locale can choose an encoding.
_ALSO = ("encodings.ascii", "encodings.idna", "encodings.latin_1", "os", "stringprep")
_PROBE = """
import sys
import agent_shim.delivery, agent_shim.install, agent_shim.__main__, agent_shim.run
import datetime, ssl
for name in sys.argv[2:]:
    __import__(name)
for name, module in sorted(sys.modules.items()):
    if name == module.__name__:  # not os.path, which is posixpath
        print(name, getattr(module, "__file__", None) or "", sep="\\t")
"""


class BundleError(Exception):
    """The bundle cannot be made here; the text says what is missing and what would do."""


def make_bundle(target: Path) -> None:
    """Write the bundle into `target`, which is emptied first.

    It is made of the Python that runs this, for this machine's architecture.

    Args:
        target: a folder of its own.

    Raises:
        BundleError: no C compiler with a static C library, or a library was not found.
    """
    if sys.platform != "linux":
        raise BundleError("the bundle is for Linux and made on Linux, for example in a container")
    shutil.rmtree(target, ignore_errors=True)
    library = target / "runtime" / "lib"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    modules = library / version
    (target / "runtime" / "bin").mkdir(parents=True)
    # Python looks for this folder to find its home, even where no extension is in it.
    (modules / "lib-dynload").mkdir(parents=True)

    python = target / "runtime" / "bin" / "python3"
    shutil.copyfile(Path(sys.executable).resolve(), python)
    binaries = [python]
    for name, path in _loaded_modules():
        if path.suffix == ".py":
            place = modules.joinpath(*name.split("."))
            place = place / "__init__.pyc" if path.stem == "__init__" else place.with_suffix(".pyc")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(_compiled(path, name))
        elif path.suffix == ".so":
            extension = modules / "lib-dynload" / path.name
            shutil.copyfile(path, extension)
            binaries.append(extension)
    loader = None
    for soname, path in _shared_libraries(binaries).items():
        shutil.copyfile(path, library / soname)
        if soname.startswith("ld-"):
            loader = soname
    if loader is None:
        raise BundleError(f"{sys.executable} has no dynamic loader; take one that has")
    _strip([*binaries, *library.glob("*.so*")])
    for path in (python, library / loader):
        path.chmod(0o755)

    (target / "runtime" / "agent-shim.pyc").write_bytes(bytecode())
    (target / "agent-shim.pyz").write_bytes(one_file())
    (target / "agent-shim.pyz").chmod(0o755)
    _compile_launcher(target / "agent-shim", loader)


def _loaded_modules() -> Iterable[tuple[str, Path]]:
    """Yield name and file of each module of the standard library that the shim can load."""
    package = Path(__file__).parent.parent
    top = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
    listing = _output([sys.executable, "-I", "-S", "-c", top + _PROBE, "--", *_ALSO])
    for line in listing.splitlines():
        name, _, file = line.partition("\t")
        if file and not name.startswith(("__main__", "_frozen", "agent_shim")):
            yield name, Path(file)
    # Frozen modules have a file as well, and Python takes os.pyc for the sign of its home.
    yield "os", Path(sysconfig.get_path("stdlib")) / "os.py"


def _compiled(path: Path, name: str) -> bytes:
    code = compile_module(path.read_text(encoding="utf-8"), name)
    return importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + bytes(8) + marshal.dumps(code)


def _shared_libraries(binaries: list[Path]) -> dict[str, Path]:
    """Return each shared library that the binaries need, the loader included, by its file name."""
    found = {}
    for line in _output(["ldd", *map(str, binaries)]).splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if "not found" in path:
            raise BundleError(f"library {name} is not installed; {sys.executable} needs it")
        file = (path if arrow else name).partition(" (")[0]
        # What has no path is the kernel's (linux-vdso) or a heading of ldd.
        if file.startswith("/") and not file.endswith(":"):
            found[Path(file).name] = Path(file)
    return found


def _strip(files: Iterable[Path]) -> None:
    if shutil.which("strip") is None:
        return  # larger, not wrong
    for file in files:
        subprocess.run(["strip", "--strip-unneeded", str(file)], check=True)


def _compile_launcher(target: Path, loader: str) -> None:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise BundleError(
            f"the launcher needs a C compiler and {compiler} is not installed;"
            " on Debian: apt-get install gcc libc6-dev"
        )
    source = Path(__file__).with_name("launcher.c")
    flags = ["-static", "-Os", "-s", "-Wall", "-Wextra", "-Werror", f'-DLOADER="{loader}"']
    _output([compiler, *flags, "-o", str(target), str(source)])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BundleError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout
