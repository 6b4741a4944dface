# SPDX-License-Identifier: Apache-2.0
"""The verdict on a record: a pure function of the evidence; a wrong limit costs no engine time.

    error        there is no evidence: the engine, the reference or the disk failed
    not_reached  there is evidence, of something else than the cell claims
    fail         a metric is past its budget, or the reference clearly prefers another token
    pass         all else

`python -m harness judge RUN` decides every record of a run again and writes the verdicts back. A run
fails too where cells disagree among themselves (harness/records/agree.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import exit_codes
from harness.evidence.record import Failure, Record
from harness.evidence.verdict import Verdict
from harness.judging.findings import error
from harness.kinds import KINDS
from harness.records import agree, store
from harness.records.explain import describe, table


def judge(record: Record[Any]) -> Verdict:
    """Decide a record from its evidence; an earlier verdict in it is not looked at."""
    expect = record.settings.get("expect") or {}
    refusal = expect.get("refusal")
    if record.failure is not None:
        return _judge_failure(record.failure, refusal)
    if refusal is not None:
        reason = f"the engine started; expected it to refuse: {refusal}"
        return Verdict(verdict="fail", reasons=[reason])
    if record.observation is None:
        return error("the record holds no observation")
    kind = KINDS.get(record.kind)
    if kind is None:
        return error(f"no kind is called {record.kind!r}; known: {', '.join(KINDS)}")
    if not isinstance(record.observation, kind.observations):
        seen = record.observation.kind
        return error(f"a cell of kind {kind.name} holds an observation of kind {seen}")
    try:
        settings = kind.settings.recorded(record.settings)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return error(f"the record's settings are not those of its kind: {place}: {first['msg']}")
    return kind.judge(settings, record)


def _judge_failure(failure: Failure, refusal: str | None) -> Verdict:
    if refusal is not None and failure.kind == "refused":
        if re.search(refusal, failure.message):
            return Verdict(verdict="pass", reasons=[f"refused as expected: {failure.message}"])
        reason = f"refused, but not with the expected sentence ({refusal}): {failure.message}"
        return Verdict(verdict="fail", reasons=[reason])
    return error(f"{failure.kind}: {failure.message}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness judge`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, results/<run>")
    parser.add_argument("--cell", action="append", default=[], help="only this cell; repeatable")


def run(args: argparse.Namespace) -> int:
    """Decide a run's records again, write the verdicts back, print a table and each failure."""
    try:
        header, found, faults = store.load_run(args.run)
    except store.RecordError as fault:
        print(fault, file=sys.stderr)
        return exit_codes.USAGE
    unknown = sorted(set(args.cell) - set(header.cells))
    if unknown:
        known = ", ".join(header.cells)
        print(f"no such cell: {', '.join(unknown)}; {header.run} has: {known}", file=sys.stderr)
        return exit_codes.USAGE
    judged = []
    for record in found:
        if args.cell and record.cell not in args.cell:
            continue
        record = record.model_copy(update={"verdict": judge(record)})
        store.save(record, args.run)
        judged.append(record)
    print(table(judged))
    for record in judged:
        if record.verdict is not None and record.verdict.verdict != "pass":
            print(f"\n{describe(record, header, args.run)}")
    odd = [] if args.cell else agree.sentences(judged)
    for sentence in odd:
        print(f"\nfail: {sentence}")
    faults = [] if args.cell else faults
    for sentence in faults:
        print(f"error: {sentence}", file=sys.stderr)
    verdicts = [record.verdict.verdict for record in judged if record.verdict is not None]
    return exit_codes.of_verdicts([*verdicts, *("fail" for _ in odd), *("error" for _ in faults)])
