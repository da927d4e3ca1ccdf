"""The shim as one file: a script, `agent-shim.pyz`, or its compiled form for the bundle.

Not a zip: to run one Python loads runpy and half of importlib, which takes longer than the shim.
"""

from __future__ import annotations
import __future__

import ast
import binascii
import importlib.util
import marshal
import sys
import zlib
from pathlib import Path

from agent_shim import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

_PACKAGE = "agent_shim"
# Version 2 has no references to earlier objects, whose use depends on what else lives in memory:
# the same source gives the same bytes.
_MARSHAL = 2
# What a run without a report never needs.
_LATE = ("agent_shim.delivery", "agent_shim.install")

_IMPORTER = """
import sys
from marshal import loads
class Importer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in NAMES:
            return type(sys.__spec__)(name, Importer, is_package=name == "agent_shim")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        exec(code_of(module.__name__), module.__dict__)
sys.meta_path.insert(0, Importer)
from agent_shim.__main__ import main
main()
"""

_SCRIPT = '''\
#!/usr/bin/env -S python3 -I -S
"""agent-shim {version}, made from the package agent_shim by agent_shim.packing. Do not edit."""
NAMES = {names!r}
EARLY = {early!r}
LATE = {late!r}
def unpack(text):
    from binascii import a2b_base64
    from zlib import decompress
    return loads(decompress(a2b_base64(text)))
def code_of(name):
    # Compiled for Python {python}; another one compiles the source.
    global EARLY
    if sys.modules["_frozen_importlib_external"].MAGIC_NUMBER != {magic!r}:
        with open(__file__, "rb") as file:
            source = unpack(file.read().rpartition(b"# ")[2])
        return compile(source[name], name, "exec", dont_inherit=True)
    if name in {late_names!r}:
        return loads(unpack(LATE)[name])
    if isinstance(EARLY, bytes):
        EARLY = unpack(EARLY)
    return loads(EARLY[name])
'''

_BYTECODE = """\
NAMES = {code!r}
def code_of(name):
    return loads(NAMES[name])
"""


def one_file() -> bytes:
    """Return the content of `agent-shim.pyz`: this package, compiled for this Python's version.

    Another version of Python runs it as well, from the source inside, a few milliseconds slower.
    """
    source, code = _modules()
    text = _SCRIPT.format(
        version=__version__,
        names=tuple(source),
        early=_pack({name: code[name] for name in code if name not in _LATE}),
        late=_pack({name: code[name] for name in _LATE}),
        python=".".join(map(str, sys.version_info[:2])),
        magic=importlib.util.MAGIC_NUMBER,
        late_names=_LATE,
    )
    # In a comment, which costs nothing to read over.
    return (text + _IMPORTER).encode("ascii") + b"# " + _pack(source)


def bytecode() -> bytes:
    """Return the same as a .pyc file, which only this version of Python runs, and fastest."""
    code = compile(_BYTECODE.format(code=_modules()[1]) + _IMPORTER, "agent-shim", "exec")
    # Flags 0b01 and a hash nobody checks: there is no source beside it (PEP 552).
    return importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + bytes(8) + marshal.dumps(code, _MARSHAL)


def _modules() -> tuple[dict[str, str], dict[str, bytes]]:
    source = {}
    code = {}
    for path in sorted(Path(__file__).parent.parent.glob("*.py")):
        name = _PACKAGE if path.stem == "__init__" else f"{_PACKAGE}.{path.stem}"
        source[name] = path.read_text(encoding="ascii")
        code[name] = marshal.dumps(
            compile_module(source[name], f"{_PACKAGE}/{path.name}"), _MARSHAL
        )
    return source, code


def compile_module(source: str, name: str) -> CodeType:
    """Compile without docstrings and without loading `__future__` at each start."""
    tree = ast.parse(source)
    flags = 0
    for node in list(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for feature in node.names:
                flags |= getattr(__future__, feature.name).compiler_flag
            tree.body.remove(node)
    code: CodeType = compile(tree, name, "exec", flags=flags, dont_inherit=True, optimize=2)
    return code


def _pack(content: dict[str, str] | dict[str, bytes]) -> bytes:
    return binascii.b2a_base64(zlib.compress(marshal.dumps(content, _MARSHAL), 9), newline=False)
