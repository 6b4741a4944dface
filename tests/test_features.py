# SPDX-License-Identifier: Apache-2.0
"""What matrices/features.yaml expects, as far as it needs no engine, and the reload, as far as a CPU can go.

Refusals need none: what each refused cell asks is configured here, and its sentence must come. Two
ranks and an FP8 cache on a CPU are in tests/test_engine_cases.py; `eager-plain`, `eager-kvfp8` and the
eager FP32 cells of two_gpus.yaml on tiny16 without experts split run on a CPU too, as on a card.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.matrices.expand import load_matrix
from tests.engines import configure

REPOSITORY = Path(__file__).parents[1]
CELLS = {cell.id: cell for cell in load_matrix(REPOSITORY / "matrices/features.yaml").cells}
REFUSED = {name: cell for name, cell in CELLS.items() if cell.settings.expect}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_a_cell_expects_to_be_refused_is_refused_in_those_words(checkpoint, monkeypatch, name):
    settings = REFUSED[name].settings
    for variable, value in settings.engine.env.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=settings.expect.refusal):
        configure(checkpoint("tiny"), **settings.engine.args)


def test_a_reload_brings_back_every_weight_and_what_is_computed_of_them(checkpoint):
    done = subprocess.run(
        [sys.executable, "-m", "tests.reloading_engine", str(checkpoint("tiny"))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "refused: weights cannot be reloaded on a CPU" in done.stdout
    found = re.search(r"(\d+) of (\d+) tensors spoiled, wrong after the reload: (.*)", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 100
    assert found[3] == "[]"


def test_the_sessions_of_these_matrices_are_those_that_the_workflow_offers():
    nox = (REPOSITORY / "noxfile.py").read_text()
    workflow = (REPOSITORY / ".github/workflows/gpu.yml").read_text()
    (options,) = re.findall(r"options: \[(.*)\]", workflow)
    for name in options.split(", "):
        assert f"def {name}(session" in nox
        assert f"matrices/{name}.yaml" in nox
