# SPDX-License-Identifier: Apache-2.0
"""`python -m harness score RUN OUT`: the references of a saved run's parity cells, computed anew.

For records whose references lack what budgets are made of today. No engine runs: checkpoints are made
again from the cells' settings, and the tokens that the records hold are scored by them. The records are
written to OUT with their verdicts; RUN stays as it is. A record whose checkpoint does not come out as it
was then, so that FP32 gives other logprobs, is named and left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness import exit_codes
from harness.evidence.record import Record
from harness.evidence.scores import Reference
from harness.judging import metrics
from harness.kinds.parity.observation import EngineObservation
from harness.kinds.parity.settings import ParitySettings
from harness.process.worker import WorkerError
from harness.records import store
from harness.records.explain import table
from harness.records.judge import judge
from harness.run.cells import CHILD_ENV, CHILDREN
from harness.scoring.client import ReferenceChild

_SAME_NATS = (
    1e-4  # FP32 on two processors: 1e-5; weights that were drawn or taught otherwise: 1 and more
)


class OtherCheckpointError(ValueError):
    """The checkpoint that is made here is not the one that the record's engine served."""


def rescored(record: Record[Any], child: ReferenceChild) -> Record[Any]:
    """Return a record with references of today and the verdict that follows.

    Raises:
        OtherCheckpointError: FP32 gives other logprobs than it gave when the record was written.
        WorkerError: the reference failed.
    """
    settings = ParitySettings.recorded(record.settings)
    observation, before, corpus = record.observation, record.reference, record.corpus
    assert isinstance(observation, EngineObservation)
    assert before is not None
    assert corpus is not None
    checkpoint = child.checkpoint(settings.checkpoint.model_dump())
    sequences = observation.sequences(corpus.token_ids)
    found = child.score(settings.precision, checkpoint, sequences).requests
    apart = max(
        float(np.max(metrics.logprob_error(old.reference.logprobs, new.reference.logprobs)))
        for old, new in zip(before.requests, found, strict=True)
    )
    if not apart <= _SAME_NATS:
        raise OtherCheckpointError(
            "its checkpoint does not come out as it was: FP32 gives logprobs up to "
            f"{apart:.2g} nats from the recorded ones, expected {_SAME_NATS:g}; run the cell again"
        )
    reference = Reference(checkpoint_sha256=before.checkpoint_sha256, requests=found)
    record = record.model_copy(update={"reference": reference})
    return record.model_copy(update={"verdict": judge(record)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness score`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, results/<run>")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new run folder")
    parser.add_argument("--cell", action="append", default=[], help="only this cell; repeatable")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="of checkpoints; default OUT/cache"
    )


def run(args: argparse.Namespace) -> int:
    """Score, judge and write the records, print a table; 3 where a cell could not be scored."""
    try:
        header, found, faults = store.load_run(args.run)
    except store.RecordError as fault:
        print(fault, file=sys.stderr)
        return exit_codes.USAGE
    if args.out.exists() and any(args.out.glob("*.json")):
        print(f"{args.out} holds a run already: name a new folder", file=sys.stderr)
        return exit_codes.USAGE
    wanted = [
        record
        for record in found
        if record.kind == "parity"
        and record.reference is not None
        and (not args.cell or record.cell in args.cell)
    ]
    if args.cell:
        faults = [fault for fault in faults if fault.split(":")[0] in args.cell]
    logs = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    cache = args.cache or args.out / "cache"
    child = ReferenceChild(CHILDREN["reference"], cache, logs, CHILD_ENV)
    scored = []
    try:
        for record in wanted:
            try:
                scored.append(rescored(record, child))
            except (OtherCheckpointError, WorkerError) as fault:
                faults.append(f"{record.cell}: {fault}")
                continue
            store.save(scored[-1], args.out)
            print(record.cell, scored[-1].verdict.verdict, flush=True)  # type: ignore[union-attr]
    finally:
        child.stop()
    cells = [record.cell for record in scored]
    store.save_header(header.model_copy(update={"cells": cells}), args.out)
    print(table(scored))
    for sentence in faults:
        print(f"error: {sentence}", file=sys.stderr)
    verdicts = [one.verdict.verdict for one in scored if one.verdict is not None]
    return exit_codes.of_verdicts([*verdicts, *("error" for _ in faults)])
