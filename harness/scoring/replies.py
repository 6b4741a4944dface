# SPDX-License-Identifier: Apache-2.0
"""What the reference child answers, as both of its ends know it. Needs no torch."""

from __future__ import annotations

from pydantic import BaseModel

from harness.evidence.scores import RequestScores


class Checkpoint(BaseModel):
    """A checkpoint: what the engine serves, and the unquantized one that the reference reads."""

    served: str
    source: str
    sha256: str
    vocab_size: int


class Rendering(BaseModel):
    """A rendered chat."""

    token_ids: list[int]


class Scored(BaseModel):
    """Scores in the order of the sequences asked for."""

    scores: list[RequestScores]
