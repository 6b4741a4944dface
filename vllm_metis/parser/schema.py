# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas as clients send them: where references lead, and whether anything can fit."""

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def resolve(reference: str, root: Any) -> Any:
    """Return the part of the schema that a local reference (`#/$defs/Name`) points at, or None."""
    if not reference.startswith("#"):
        return None
    node = root
    for step in reference.lstrip("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        elif isinstance(node, Mapping) and step in node:
            node = node[step]
        else:
            return None
    return node


def mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under the key, an empty one if there is none."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def items(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under the key, an empty one if there is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def is_circular(schema: Any) -> bool:
    """Whether the schema's references lead back to themselves, so that no finite value fits.

    `{"$ref": "#"}` says nothing but itself; a list whose items are such lists is fine, it may be empty.
    """
    if '"$ref"' not in json.dumps(schema):
        return False
    # The references of which a value is known to exist, until no more of them turn up.
    known: set[str] = set()
    references = _references(schema)
    while new := {one for one in references - known if _ends(resolve(one, schema), known)}:
        known |= new
    return not _ends(schema, known)


def _references(node: Any) -> set[str]:
    found: set[str] = set()
    if isinstance(node, Mapping):
        if isinstance(reference := node.get("$ref"), str):
            found.add(reference)
        node = list(node.values())
    if isinstance(node, list):
        found.update(*map(_references, node))
    return found


def _ends(schema: Any, known: AbstractSet[str]) -> bool:
    """Whether a finite value of the schema exists, if one does for the known references only."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in known:
        return False
    if not all(_ends(part, known) for part in items(schema, "allOf")):
        return False
    for union in ("anyOf", "oneOf"):
        branches = items(schema, union)
        if branches and not any(_ends(branch, known) for branch in branches):
            return False
    properties = mapping(schema, "properties")
    required = [name for name in items(schema, "required") if isinstance(name, str)]
    if _is_always(schema, "object") and not all(
        _ends(properties.get(name), known) for name in required
    ):
        return False
    least = schema.get("minItems", 0)
    needs_items = _is_always(schema, "array") and isinstance(least, int) and least > 0
    return not needs_items or _ends(schema.get("items"), known)


def _is_always(schema: Mapping[str, Any], kind: str) -> bool:
    return schema.get("type") in (kind, [kind])
