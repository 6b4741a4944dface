# SPDX-License-Identifier: Apache-2.0
"""`python -m harness report RUN`: a run as Markdown for a pull request and as one HTML page.

Both show what the records say and decide nothing. The page is one file without a network: a table
to sort and filter, everything known of each cell behind its row, and the plots where matplotlib is
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from harness import exit_codes
from harness.evidence.record import Record, Run
from harness.evidence.verdict import Finding
from harness.files import write_atomic
from harness.judging.numbers import number
from harness.records import agree, compare
from harness.records.baseline import FOLDER, baseline_path
from harness.records.explain import cached_tokens, describe, figures, headline, kind_of
from harness.records.store import RecordError, load_run
from harness.records.summary import summarise_run
from harness.report.figures import markdown_table, markdown_tables, tables_side_by_side

_TEMPLATES = Path(__file__).parent
_ORDER = ("error", "not_reached", "fail", "skip", "pass")


def markdown(
    header: Run, found: Sequence[Record[Any]], faults: Sequence[str], against: str | None
) -> str:
    """The run for a pull request: counts, a table of cells, and each failure folded."""
    lines = [
        f"### {header.matrix}: {_counts(found, faults)}",
        "",
        header.question,
        "",
        f"Run `{header.run}` on {_machine(header)}.",
        "",
    ]
    lines += [f"- **fail**: {sentence}" for sentence in agree.sentences(found)]
    if against is not None:
        lines += ["Against the baseline:", "", "```text", against, "```", ""]
    heads = ["cell", "verdict", "metric", "observed", "budget", "floor", "margin", "cached tokens"]
    rows = []
    for record in _by_gravity(found):
        cells = [record.cell, f"**{_verdict(record)}**" if _verdict(record) != "pass" else "pass"]
        finding = headline(record)
        cells += [finding.metric, *_numbers(finding)] if finding else ["-"] * 5
        cached = cached_tokens(record)
        cells.append("-" if cached is None else str(cached))
        rows.append(cells)
    rows += [[fault, "**error**", *["-"] * 6] for fault in faults]
    lines += [*markdown_table(heads, rows, texts=3), *markdown_tables(found)]
    for record in _by_gravity(found):
        if _verdict(record) != "pass":
            text = describe(record, header, Path("results", header.run))
            lines += [
                "",
                f"<details><summary>{record.cell}</summary>",
                "",
                "```text",
                text,
                "```",
                "",
            ]
            lines.append("</details>")
    return "\n".join(lines) + "\n"


def html(
    header: Run, found: Sequence[Record[Any]], faults: Sequence[str], against: str | None
) -> str:
    """The run as one page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = number
    plots: list[Any] = []
    if importlib.util.find_spec("matplotlib"):
        from harness.report.plots import draw

        plots = draw(found)
    axes: dict[str, list[str]] = {}
    for record in found:
        for axis, value in record.axes.items():
            values = axes.setdefault(axis, [])
            if value not in values:
                values.append(value)
    return environment.get_template("report.html.jinja").render(
        header=header,
        machine=_machine(header),
        counts=_counts(found, faults),
        verdicts=[name for name in _ORDER if name in set(map(_verdict, found))],
        axes=axes,
        faults=[*faults, *agree.sentences(found)],
        against=against,
        plots=plots,
        measured=tables_side_by_side(found),
        rows=[_row(record, header) for record in _by_gravity(found)],
    )


def _row(record: Record[Any], header: Run) -> dict[str, Any]:
    return {
        "record": record,
        "verdict": _verdict(record),
        "finding": headline(record),
        "figures": figures(record),
        "cached": cached_tokens(record),
        "seconds": sum(record.timings_s.values()),
        "text": describe(record, header, Path("results", header.run)),
        "tables": kind.tables(record) if (kind := kind_of(record)) else [],
        "settings": json.dumps(record.settings, indent=2),
    }


def _verdict(record: Record[Any]) -> str:
    return record.verdict.verdict if record.verdict else "error"


def _by_gravity(found: Sequence[Record[Any]]) -> list[Record[Any]]:
    """Cells that need a look first, each kind in the order of the matrix."""
    return sorted(found, key=lambda record: _ORDER.index(_verdict(record)))


def _numbers(finding: Finding) -> list[str]:
    return [number(v) for v in (finding.observed, finding.budget, finding.floor, finding.margin)]


def _counts(found: Sequence[Record[Any]], faults: Sequence[str]) -> str:
    counts = Counter(map(_verdict, found))
    counts["error"] += len(faults)
    return (
        ", ".join(f"{counts[name]} {name}" for name in reversed(_ORDER) if counts[name])
        or "no cell"
    )


def _machine(header: Run) -> str:
    environment = header.environment
    cards = Counter(card.name for card in environment.cards)
    hardware = ", ".join(f"{count} x {name}" for name, count in cards.items())
    engine = next(
        (f"{n} {v}" for n, v in environment.versions.items() if n.startswith("vllm")), "no vLLM"
    )
    return f"{hardware or environment.machine.processor}, {engine}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness report`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, results/<run>")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write; default the run folder"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="A",
        help="compare with this run or baseline; default the card's",
    )


def run(args: argparse.Namespace) -> int:
    """Write report.md and report.html and print where they are."""
    try:
        header, found, faults = load_run(args.run)
        against = _against(args.baseline, header, found)
    except (RecordError, compare.UnlikeError) as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    folder = args.out or args.run
    for name, make in (("report.md", markdown), ("report.html", html)):
        write_atomic(folder / name, make(header, found, faults, against))
        print(folder / name)
    return exit_codes.PASSED


def _against(baseline: Path | None, header: Run, found: list[Record[Any]]) -> str | None:
    """The comparison with a baseline: the one given, or the card's own where there is one."""
    summary = summarise_run(found, header.matrix, header.started, header.environment)
    if baseline is not None:
        return compare.describe(compare.compare(compare.load(baseline)[0], summary))
    path = baseline_path(summary, FOLDER)
    if not path.exists():
        return None
    try:
        return compare.describe(compare.compare(compare.load(path)[0], summary))
    except compare.UnlikeError as error:
        return f"the baseline measured something else; renew it\n{error}"
