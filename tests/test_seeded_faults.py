# SPDX-License-Identifier: Apache-2.0
"""A fault in the engine turns the cells red that it must, no others, and they say where to look.

Cells of matrices/cpu_parity.yaml run as they are; only the engine's child has one thing wrong
(tests/faults). An error in the medians below is what the fault costs on the tiny checkpoint in
FP32, where a correct run is off by 3e-6 nats.
"""

import re
import sys
from pathlib import Path

import pytest

from harness import records
from harness.explain import describe
from harness.matrix import load_matrix, select
from harness.run_cells import CellRunner

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
    "dropped_selection_bias": ({"fp32-alone-tiny": PREFILL.format(4, 4)}, 0.08),
    "swapped_x_and_z": ({"fp32-alone-tiny": PREFILL.format(4, 4)}, 3.3),
    "skipped_last_read": ({"fp32-alone-tiny": PREFILL.format(4, 4)}, 0.05),
    # A prompt that is prefilled in one step reads no state; one that is cut into chunks does.
    "shared_state": (
        {"fp32-alone-tiny": DECODING.format(4, 4), "fp32-chunk64-tiny": PREFILL.format(5, 8)},
        1.7,
    ),
    "foreign_prefix": (
        {
            "fp32-repeated-tiny": GREEN,
            "fp32-cached-tiny": f"{PREFILL.format(2, 12)}, exactly those with a prefix-cache hit",
        },
        2.2,
    ),
}


@pytest.fixture
def run_faulty(tmp_path):
    """Return a function that runs cells with a fault: records by cell, and what a person reads."""

    def run(fault: str, cells: list[str]) -> tuple[dict[str, records.Record], dict[str, str]]:
        children = {"parity": (sys.executable, "-m", "tests.faults", fault)}
        matrix = load_matrix(MATRIX)
        runner = CellRunner(matrix, tmp_path / "run", children=children)
        try:
            runner.open(cells, "now", "matrices/cpu_parity.yaml")
            for cell in select(matrix, cells, []):
                runner.run(cell)
                runner.finish_group(cell.group)
        finally:
            runner.close()
        header, found, faults = records.load_run(tmp_path / "run")
        assert faults == []
        texts = {record.cell: describe(record, header, tmp_path / "run") for record in found}
        return {record.cell: record for record in found}, texts

    return run


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
        assert re.search(r"decode_logprob_error_max \S+ is past its budget 0.0001", text)
        worst = found[cell].verdict.worst[0]
        assert f"{worst.request}[{worst.position}] token {worst.token_id}: reference" in text
        median = float(re.search(r"there by (\S+) nats in the median", text)[1])
        assert median_nats / 3 < median < median_nats * 3
