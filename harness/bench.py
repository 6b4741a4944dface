# SPDX-License-Identifier: Apache-2.0
"""Measure what is not a matrix: `bench parsers` is what streaming costs per token in the parsers."""

from __future__ import annotations

import argparse

from harness import bench_parsers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    parsers = benches.add_parser(
        "parsers",
        help="streaming cost per token in the parsers",
        description=bench_parsers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_parsers.add_arguments(parsers)


def run(args: argparse.Namespace) -> int:
    return bench_parsers.run(args)
