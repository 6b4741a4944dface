# SPDX-License-Identifier: Apache-2.0
"""What may import what, by folder: no import runs upwards, and few folders know torch or vLLM."""

import ast
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.kinds import KINDS
from harness.run.environment import evidence_sources

HARNESS = Path(__file__).parents[2] / "harness"
ORDER = (
    "exit_codes",
    "files",
    "strict_yaml",
    "evidence",
    "machine",
    "judging",
    "process",
    "prompts",
    "reference",
    "checkpoints",
    "generated_code",
    "repetition",
    "engine",
    "scoring",
    "serving",
    "loaded_weights",
    "kinds",
    "matrices",
    "records",
    "report",
    "run",
    "__main__",
)
"""Folders and files of the harness, each of which may import those before it, and itself."""

HEAVY = ("torch", "vllm", "transformers", "matplotlib")
MAY_BE_HEAVY = (
    "reference",
    "checkpoints",
    "scoring",
    "engine",
    "serving",
    "loaded_weights",
    *(f"kinds.{name}.child" for name in KINDS),
    "report.plots",
)
"""Where torch, vLLM and the like may be imported: by folder, children of kinds included."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the harness by its name below it, packages by that of their folder."""
    for path in sorted(HARNESS.rglob("*.py")):
        parts = path.relative_to(HARNESS).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_every_folder_has_its_place():
    rooms = {name.split(".")[0] for name, _ in modules() if name}
    assert rooms == set(ORDER)


def test_no_import_runs_upwards():
    place = {name: index for index, name in enumerate(ORDER)}
    upwards = [
        f"{name} imports {other}"
        for name, path in modules()
        for other in sorted(imported(path))
        if name
        and other.startswith("harness.")
        and place[other.split(".")[1]] > place[name.split(".")[0]]
    ]
    assert upwards == []


def test_a_kind_imports_no_other_kind():
    strange = [
        f"{name} imports {other}"
        for name, path in modules()
        for other in sorted(imported(path))
        for kind in KINDS
        if name.startswith(f"kinds.{kind}")
        and other.startswith(tuple(f"harness.kinds.{one}." for one in KINDS if one != kind))
    ]
    assert strange == []


def test_no_test_module_imports_another():
    tests = HARNESS.parent / "tests"
    shared = [
        f"{path.relative_to(tests)} imports {other}"
        for path in sorted(tests.rglob("*.py"))
        for other in sorted(imported(path))
        if other.startswith("tests.") and ".test_" in other
    ]
    assert shared == []


def test_only_some_folders_import_torch_or_vllm():
    heavy = [
        name
        for name, path in modules()
        if any(other.split(".")[0] in HEAVY for other in imported(path))
    ]
    assert [name for name in heavy if not name.startswith(MAY_BE_HEAVY)] == []


def test_importing_all_other_modules_imports_nothing_heavy():
    light = [
        f"harness.{name}" if name else "harness"
        for name, _ in modules()
        if not name.startswith(MAY_BE_HEAVY) and name != "__main__"
    ]
    assert len(light) > 50
    imports = "; ".join(f"import {name}" for name in light)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; {imports}; print([*filter(sys.modules.get, {HEAVY})])",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=HARNESS.parent,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_what_a_child_stands_on_invalidates_its_records(kind):
    rooms = {"engine", "generated_code", "repetition", "serving", "scoring", "checkpoints"}
    rooms |= {"reference", "prompts"}
    paths = dict(modules())
    waiting = [name for name in paths if name.startswith(f"kinds.{kind.name}.child")]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        reached.add(name)
        for other in imported(paths[name]):
            root, *parts = other.split(".")
            names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            waiting += [
                one
                for one in names
                if root == "harness"
                and one in paths
                and one not in reached
                and one.split(".")[0] in rooms
            ]
    stood_on = {name.split(".")[0] for name in reached} & rooms
    sources = {name.removesuffix(".py") for name in evidence_sources(kind)}
    assert stood_on <= sources
    assert f"kinds/{kind.name}/child" in sources


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_what_selects_judges_or_shows_invalidates_no_record(kind):
    sources = evidence_sources(kind)
    for name in ("judging", "matrices", "records", "report", "run", f"kinds/{kind.name}/judge.py"):
        assert not any(one == name or name.startswith(f"{one}/") for one in sources)


def test_an_edit_of_one_kinds_child_leaves_the_records_of_another_alone():
    shared = {name: set(evidence_sources(kind)) for name, kind in KINDS.items()}
    for one, other in itertools.permutations(KINDS, 2):
        assert not any(name.startswith(f"kinds/{one}/") for name in shared[other])
