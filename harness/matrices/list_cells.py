# SPDX-License-Identifier: Apache-2.0
"""`python -m harness list MATRIX`: the cells, their engines, and what running them should cost."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness import exit_codes
from harness.judging.numbers import duration
from harness.matrices.expand import load_matrix
from harness.matrices.select import SelectionError, groups, select
from harness.strict_yaml import YamlError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness list`."""
    parser.add_argument(
        "matrix", type=Path, metavar="MATRIX", help="a file such as matrices/cpu_parity.yaml"
    )
    parser.add_argument("--cell", action="append", default=[], metavar="GLOB")
    parser.add_argument("--axis", action="append", default=[], metavar="AXIS=VALUE")


def run(args: argparse.Namespace) -> int:
    """Print the cells by engine; nothing is started."""
    try:
        matrix = load_matrix(args.matrix)
        cells = select(matrix, args.cell, args.axis)
    except (YamlError, SelectionError) as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    print(matrix.question)
    by_group = groups(cells)
    for name, members in by_group.items():
        arguments = members[0].written.get("engine", {}).get("args", {})
        shown = " ".join(f"{key}={json.dumps(value)}" for key, value in sorted(arguments.items()))
        print(f"\n{name}  {shown}".rstrip())
        for cell in members:
            print(f"  {cell.id}")
    print(f"\n{len(cells)} cells on {len(by_group)} engines", end="")
    if matrix.estimate is not None:
        seconds = (
            len(cells) * matrix.estimate.cell_s + len(by_group) * matrix.estimate.engine_start_s
        )
        print(
            f", about {duration(seconds)} and {matrix.estimate.memory_bytes / 1e9:.1f} GB", end=""
        )
    print()
    return exit_codes.PASSED
