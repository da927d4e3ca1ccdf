"""As much of JSON Schema as docs/*.schema.json uses; a keyword that it does not know is an error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent.parent / "docs"
_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_WORDS = {"$schema", "$id", "$defs", "title", "description"}
_KNOWN = _WORDS | {
    "type",
    "required",
    "properties",
    "additionalProperties",
    "const",
    "enum",
    "pattern",
    "minLength",
    "anyOf",
    "$ref",
}


def load(name: str) -> dict[str, Any]:
    return json.loads((DOCS / name).read_text())


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """Return what is wrong with a value, by its place."""
    unknown = set(schema) - _KNOWN
    assert not unknown, f"{at}: the schema uses {unknown}"
    found: list[str] = []
    if ref := schema.get("$ref"):
        found += problems(value, root["$defs"][ref.removeprefix("#/$defs/")], root, at)
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(
            isinstance(value, _TYPES[t]) and (t == "boolean") == isinstance(value, bool)
            for t in types
        ):
            found.append(f"{at}: {value!r} is no {types}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{at}: {value!r} is not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is none of {schema['enum']}")
    if "anyOf" in schema and all(problems(value, one, root, at) for one in schema["anyOf"]):
        found.append(f"{at}: {value!r} fits nothing of anyOf")
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(f"{at}: {value!r} does not match")
        if len(value) < schema.get("minLength", 0):
            found.append(f"{at}: {value!r} is too short")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{at}: no {name}" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            if name in properties:
                found += problems(inner, properties[name], root, f"{at}.{name}")
            elif schema.get("additionalProperties") is False:
                found.append(f"{at}: {name} is too much")
    return found
