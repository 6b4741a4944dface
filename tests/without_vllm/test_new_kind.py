# SPDX-License-Identifier: Apache-2.0
"""A kind of cell is one folder and one line: a toy one is added to a copy of the harness and run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

FOLDER = {
    "settings.py": '''
"""What a toy cell counts."""

from typing import Annotated

from pydantic import Field

from harness.kinds.settings import CellSettings
from harness.strict_yaml import StrictModel


class Count(StrictModel):
    """What a toy cell counts to."""

    up_to: Annotated[int, Field(ge=1)]


class ToySettings(CellSettings):
    """A child that counts."""

    toy: Count
''',
    "observation.py": '''
"""What a toy cell sees."""

from typing import Literal

from harness.evidence.base import Observation


class ToyObservation(Observation):
    """How far the child came."""

    kind: Literal["toy"] = "toy"
    counted: int
''',
    "child.py": '''
"""The child of a toy matrix."""

from harness.evidence.record import Gathered
from harness.kinds.toy.observation import ToyObservation
from harness.kinds.toy.settings import ToySettings
from harness.process import child_loop


def build(config):
    def handle(job):
        counted = min(ToySettings.model_validate(job["settings"]).toy.up_to, config["most"])
        return Gathered[ToyObservation](observation=ToyObservation(counted=counted))

    return {}, handle


if __name__ == "__main__":
    child_loop.main(build)
''',
    "judge.py": '''
"""The verdict on a toy cell."""

from harness.evidence.verdict import Finding, Verdict


def judge(settings, observation):
    found, wanted = float(observation.counted), float(settings.toy.up_to)
    finding = Finding(
        metric="counted", observed=found, budget=wanted, floor=None, passed=found == wanted
    )
    return Verdict(verdict="pass" if finding.passed else "fail", findings=[finding])
''',
    "__init__.py": '''
"""Toy: a child that counts."""

from harness.judging.metrics import Metric
from harness.kinds.kind import Kind
from harness.kinds.toy.judge import judge
from harness.kinds.toy.observation import ToyObservation
from harness.kinds.toy.settings import ToySettings


class Toy(Kind[ToySettings, ToyObservation]):
    name = "toy"
    summary = "a child that counts"
    settings = ToySettings
    observations = (ToyObservation,)
    metrics = {"counted": Metric("steps", "higher")}
    headlines = ("counted",)

    def child_config(self, settings, written, group, workshop):
        return {"most": 5}

    def judge(self, settings, record):
        return judge(settings, record.observation)


KIND = Toy()
''',
}
MATRIX = """\
schema_version: 1
kind: toy
question: Does it count?
base: {timeout: {start_s: 30, cell_s: 30}}
axes:
  size:
    three: {toy: {up_to: 3}}
    nine: {toy: {up_to: 9}}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the harness with the toy kind in it."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(REPOSITORY / "harness", root / "harness")
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy2(REPOSITORY / name, root)
    folder = root / "harness" / "kinds" / "toy"
    folder.mkdir()
    for name, text in FOLDER.items():
        (folder / name).write_text(text.lstrip())
    table = root / "harness" / "kinds" / "__init__.py"
    before = table.read_text()
    table.write_text(before.replace('    "soak",\n', '    "soak",\n    "toy",\n'))
    assert len(table.read_text().splitlines()) == len(before.splitlines()) + 1
    (root / "demo.yaml").write_text(MATRIX)
    return root


def run(copy: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=copy, capture_output=True, text=True, check=False
    )


def test_a_new_kind_is_run_judged_shown_and_compared(copy):
    done = run(copy, "pytest", "demo.yaml", "--results", "out", "-p", "no:cacheprovider")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "pass        three: counted 3 of 3" in done.stdout
    assert "fail        nine: counted 5 of 9" in done.stdout
    assert run(copy, "harness", "judge", "out").returncode == 1
    report = run(copy, "harness", "report", "out")
    assert report.returncode == 0, report.stderr
    assert "counted" in (copy / "out" / "report.html").read_text()
    assert run(copy, "harness", "compare", "out", "out").returncode == 0


def test_a_faulty_matrix_of_a_new_kind_is_told_like_any_other(copy):
    (copy / "faulty.yaml").write_text(MATRIX.replace("up_to: 3", "up_to: three, by: 1"))
    done = run(copy, "harness", "list", "faulty.yaml")
    assert done.returncode == 2
    assert "faulty.yaml:7: axes.size.three.toy.up_to: expected a valid integer" in done.stderr
    assert "faulty.yaml:7: unknown key 'by' in axes.size.three.toy; allowed: up_to" in done.stderr


def test_the_schema_describes_a_new_kind(copy):
    assert run(copy, "harness", "schema").returncode == 0
    assert "What a toy cell counts to." in (copy / "matrices" / "schema.json").read_text()


def test_an_edit_of_its_child_and_no_other_asks_for_a_new_run(copy):
    def resumed() -> bool:
        options = ("--resume", "out", "--cell", "three", "-p", "no:cacheprovider")
        return "as recorded" in run(copy, "pytest", "demo.yaml", *options).stdout

    assert resumed()
    other = copy / "harness" / "kinds" / "soak" / "child" / "clients.py"
    other.write_text(other.read_text() + "# another soak\n")
    assert resumed()
    child = copy / "harness" / "kinds" / "toy" / "child.py"
    child.write_text(child.read_text() + "# another toy\n")
    assert not resumed()
