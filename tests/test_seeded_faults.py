# SPDX-License-Identifier: Apache-2.0
"""A fault in the engine turns the cells red that it must, no others, and they say where to look.

Cells of matrices/cpu_parity.yaml run as they are; only the engine's child has one thing wrong
(tests/faults). An error in the medians below is what the fault costs on the tiny checkpoint in
FP32, where a correct run is off by 3e-6 nats.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.evidence.record import Record
from harness.matrices.expand import load_matrix
from harness.matrices.select import groups, select
from harness.records import store as records
from harness.records.explain import describe
from harness.run.cells import CellRunner

MATRIX = Path(__file__).parents[1] / "matrices" / "cpu_parity.yaml"
GREEN = None
PREFILL = "from the first token (prefill): {} of {} requests"
DECODING = "from token 2 or later, the first one right (decoding): {} of {} requests"


# By fault: what each cell says of where it deviates, and the median of the errors there, in nats.
FAULTS = {
    # Twice the rounding of BF16 hides it: what FP32 cells are for.
    "swapped_epsilons": (
        {"fp32-alone-tiny": PREFILL.format(4, 4), "bf16-alone-tiny": GREEN},
        7e-4,
    ),
    "swapped_passes": ({"fp32-alone-tiny": PREFILL.format(4, 4)}, 1.5),
    "dropped_selection_bias": (
        {
            "fp32-alone-tiny": PREFILL.format(4, 4),
            # Most of it is below BF16's budgets of positions; processors round which of it is past.
            "bf16-alone-tiny": "from the first token (prefill): ",
        },
        0.08,
    ),
    "swapped_x_and_z": ({"fp32-alone-tiny": PREFILL.format(4, 4)}, 3.3),
    "skipped_last_read": ({"fp32-alone-tiny": PREFILL.format(4, 4)}, 0.05),
    # The short prompt of the cell is right, both times.
    "late_positions": ({"fp32-far-tiny": PREFILL.format(2, 4)}, 0.003),
    # A prompt that is prefilled in one step reads no state; one that is cut into chunks does.
    "shared_state": (
        {"fp32-alone-tiny": DECODING.format(4, 4), "fp32-chunk64-tiny": PREFILL.format(5, 8)},
        1.7,
    ),
    "foreign_prefix": (
        # Requests without a hit are right, in the same cell.
        {"fp32-cached-tiny": f"{PREFILL.format(2, 12)}, exactly those with a prefix-cache hit"},
        2.2,
    ),
}


@pytest.fixture(scope="module")
def run_faulty(tmp_path_factory) -> Iterator[Callable[..., tuple[dict, dict]]]:
    """Return a function that runs cells with a fault: records by cell, and what a person reads.

    All faults are held against one reference, which runs each prompt once.
    """
    matrix, folder = load_matrix(MATRIX), tmp_path_factory.mktemp("faults")
    runner = CellRunner(matrix, folder, children={"parity": (sys.executable, "-m", "tests.faults")})

    def run(fault: str, cells: list[str]) -> tuple[dict[str, Record], dict[str, str]]:
        runner.open(cells, "now", "matrices/cpu_parity.yaml")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SEEDED_FAULT", fault)
            for group, members in groups(select(matrix, cells, [])).items():
                for cell in members:
                    runner.run(cell)
                runner.finish_group(group)
        header = records.load_header(folder)
        found = {cell: records.load(records.record_path(folder, cell)) for cell in cells}
        return found, {cell: describe(one, header, folder) for cell, one in found.items()}

    yield run
    runner.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_right_cells_red_and_they_say_where(run_faulty, fault):
    cells, median_nats = FAULTS[fault]
    found, texts = run_faulty(fault, list(cells))
    verdicts = {cell: record.verdict.verdict for cell, record in found.items()}
    assert verdicts == {cell: "pass" if place is GREEN else "fail" for cell, place in cells.items()}
    for cell, place in cells.items():
        if place is GREEN:
            continue
        text = texts[cell]
        assert place in text
        worst = found[cell].verdict.worst[0]
        assert f"{worst.request}[{worst.position}] token {worst.token_id}: reference" in text
        if cell.startswith("bf16"):
            continue  # the median is of the positions past BF16's budgets, and so above them
        assert re.search(r"decode_logprob_error_max \S+ is past its budget [\d.]+e-05", text)
        median = float(re.search(r"there by (\S+) nats in the median", text)[1])
        assert median_nats / 3 < median < median_nats * 3


def test_a_race_turns_those_cells_red_that_ask_again_and_no_others(run_faulty):
    verdicts = {
        "fp32-alone-tiny": "pass",
        "fp32-same_batch-tiny": "fail",
        "fp32-same_hits-tiny": "fail",
    }
    found, texts = run_faulty("race", list(verdicts))
    assert {cell: record.verdict.verdict for cell, record in found.items()} == verdicts
    for cell in ("fp32-same_batch-tiny", "fp32-same_hits-tiny"):
        failed = [one.metric for one in found[cell].verdict.findings if not one.passed]
        assert failed == ["rows_of_other_bits"]
        assert "other ones each time, as of a race" in texts[cell]
    (again,) = found["fp32-same_batch-tiny"].observation.repetitions
    assert 0.02 < again.other_rows / (again.times * again.rows) < 0.04
    assert re.search(
        r"0\.3-long, time \d of 5: \d+ rows came back .*: row \d+, ", texts["fp32-same_batch-tiny"]
    )
