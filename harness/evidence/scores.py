# SPDX-License-Identifier: Apache-2.0
"""What the reference says of tokens that a candidate gave, and what the candidate said of them."""

from __future__ import annotations

from typing import Protocol

from harness.evidence.base import Evidence


class ScoredTokens(Protocol):
    """Tokens with a candidate's logprobs. `T` is their number, `K` the number of top tokens."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...  # (T,)
    @property
    def logprobs(self) -> list[float]: ...  # (T,), nats
    @property
    def top_token_ids(self) -> list[list[int]]: ...  # (T, K), most likely first
    @property
    def top_logprobs(self) -> list[list[float]]: ...  # (T, K), nats


class Scores(Evidence):
    """Teacher-forced scores of a candidate's tokens by the reference port, in one precision."""

    logprobs: list[float]  # (T,), of the candidate's token, nats
    top_logprobs: list[list[float]]  # (T, K), at the candidate's top tokens, nats
    argmax: list[int]  # (T,)
    argmax_logprobs: list[float]  # (T,), nats
    max_abs_logit: list[float]  # (T,)


class PromptFloor(Evidence):
    """Errors against FP32 inside a prompt, of the references that differ in rounding only.

    They cost nothing (the same forward passes give them) and are many: the worst of a hundred
    generated positions says little of the worst that a precision does.
    """

    positions: int
    maximum: dict[str, float]  # by metric, of the worst reference; at each one's own best tokens
    mean: dict[str, float]


class RequestScores(Evidence):
    """What the references say of a request; `N` is the number of those that differ in rounding only.

    Attributes:
        port: in the served precision, without jitter; None where that is FP32.
        roundings: by metric, what each reference that differs in rounding only is off the FP32
            reference at each of the candidate's tokens, (N, T); the port is the first of them. None in
            records from before December 2026, which had the port alone: their scores are to be made
            again.
    """

    reference: Scores
    port: Scores | None
    prompt_floor: PromptFloor | None
    roundings: dict[str, list[list[float]]] | None = None


class Reference(Evidence):
    """Scores in the order of the observation's requests."""

    checkpoint_sha256: str
    requests: list[RequestScores]
