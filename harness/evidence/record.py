# SPDX-License-Identifier: Apache-2.0
"""The record of one cell: what was asked, what was observed, what was decided.

A record is evidence first. `observation` and `reference` are written once and never changed;
`verdict` is a pure function of the rest (harness/records/judge.py) and may be decided again at any
time.

The schema is versioned by a literal: a breaking change raises it, and an older file is refused by
name.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from harness.evidence.base import Evidence, Observation
from harness.evidence.environment import Environment
from harness.evidence.scores import Reference
from harness.evidence.verdict import Verdict

SCHEMA_VERSION: Literal[1] = 1

FailureKind = Literal[
    "refused", "start_timeout", "crashed", "timeout", "garbage", "failed", "system"
]

_Seen = TypeVar("_Seen", bound=Observation)


class Failure(Evidence):
    """Why there is no observation, or no reference."""

    kind: FailureKind
    message: str
    log_tail: str = ""


class Corpus(Evidence):
    """The prompts as frozen token ids."""

    sha256: str
    token_ids: dict[str, list[int]]


class Identity(Evidence):
    """What makes two records of a cell the same measurement."""

    cell_sha256: str  # settings and prompt definitions
    versions_sha256: str  # packages, the sources that make the evidence, card


class Gathered(Evidence, Generic[_Seen]):
    """What a child gives of a cell where it gives all of it at once."""

    observation: _Seen
    corpus: Corpus | None = None
    reference: Reference | None = None


class Record(Evidence, Generic[_Seen]):
    """Everything known of one cell of one run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    matrix: str
    kind: str
    cell: str
    axes: dict[str, str]
    engine_group: str
    settings: dict[str, Any]
    identity: Identity
    environment: Environment
    seeds: dict[str, int]
    timings_s: dict[str, float]
    log: str | None
    corpus: Corpus | None = None
    observation: _Seen | None = None
    reference: Reference | None = None
    failure: Failure | None = None
    verdict: Verdict | None = None


class Run(Evidence):
    """The header of a run folder, which names the cells that were selected."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    matrix: str
    matrix_path: str
    question: str
    cells: list[str]
    started: str
    environment: Environment
