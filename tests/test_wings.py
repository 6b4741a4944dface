# SPDX-License-Identifier: Apache-2.0
"""The plugin's folders: no import runs upwards, and none leaves the wheel."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_metis

PLUGIN = Path(vllm_metis.__file__).parent
BELOW = {
    "version": set(),
    "config": set(),
    "__init__": {"version", "hook"},  # the hook in `register()` alone: tests/test_register.py
    "checkpoint": {"config"},
    "model": {"config", "checkpoint"},
    "parser": set(),
    "hook": {"config", "checkpoint"},
    "cli": {"config", "checkpoint", "hook"},
    "__main__": {"cli"},
}
"""What of the plugin each file or folder of it may import, beside itself."""


def imported(file: Path) -> Iterator[str]:
    """Yield the full name of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: line {node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("wing", BELOW)
def test_no_import_runs_upwards(wing: str):
    files = [PLUGIN / f"{wing}.py", *(PLUGIN / wing).glob("*.py")]
    names = {name for file in files if file.is_file() for name in imported(file)}
    own = {name.split(".")[1] for name in names if name.startswith("vllm_metis.")}
    assert own <= {wing} | BELOW[wing]
    assert not any(name.split(".")[0] in ("harness", "tests") for name in names)


def test_every_file_has_its_place():
    found = {path.stem for path in PLUGIN.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__pycache__"} == set(BELOW)
