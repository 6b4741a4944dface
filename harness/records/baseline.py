# SPDX-License-Identifier: Apache-2.0
"""`python -m harness baseline RUN`: keep a run's figures as the baseline of its matrix on its card.

Baselines lie in `matrices/baselines/<card>/<matrix>.json`, one for each kind of card. A run is kept
only when every cell of the matrix passed, and an existing baseline is replaced only with `--renew`,
after showing what moves: a baseline never changes by accident.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import exit_codes
from harness.evidence.record import Run
from harness.files import write_atomic
from harness.matrices.expand import MATRICES, load_matrix
from harness.records import compare
from harness.records.store import RecordError, load_run
from harness.records.summary import RunSummary, summarise_run
from harness.strict_yaml import YamlError

FOLDER = MATRICES / "baselines"


def baseline_path(summary: RunSummary, folder: Path = FOLDER) -> Path:
    """Where the baseline of a matrix on a card lies."""
    return folder / summary.card / f"{summary.matrix}.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness baseline`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, results/<run>")
    parser.add_argument("--renew", action="store_true", help="replace the baseline that is there")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default matrices/baselines")


def run(args: argparse.Namespace) -> int:
    """Write the baseline; 1 when the run is not fit to be one, 2 when one is there already."""
    try:
        header, found, faults = load_run(args.run)
        faults += _missing(header)
    except (RecordError, YamlError) as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    faults += [
        f"{record.cell}: {record.verdict.verdict if record.verdict else 'not judged'}"
        for record in found
        if record.verdict is None or record.verdict.verdict != "pass"
    ]
    if faults:
        print(
            "not a baseline: every cell of the matrix must have passed",
            *faults,
            sep="\n",
            file=sys.stderr,
        )
        return exit_codes.FAILED
    summary = summarise_run(found, header.matrix, header.started, header.environment)
    path = baseline_path(summary, args.folder)
    if path.exists():
        print(_what_moves(path, summary))
        if not args.renew:
            print(f"{path} is there; pass --renew to replace it", file=sys.stderr)
            return exit_codes.USAGE
    write_atomic(path, summary.model_dump_json(indent=1) + "\n")
    print(path)
    return exit_codes.PASSED


def _missing(header: Run) -> list[str]:
    """Cells of the matrix that the run did not select."""
    matrix = load_matrix(Path(header.matrix_path))
    return [f"{cell.id}: not in this run" for cell in matrix.cells if cell.id not in header.cells]


def _what_moves(path: Path, summary: RunSummary) -> str:
    try:
        return compare.describe(compare.compare(compare.load(path)[0], summary))
    except (RecordError, compare.UnlikeError) as error:
        return str(error)
