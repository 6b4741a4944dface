# SPDX-License-Identifier: Apache-2.0
"""What a parity cell sees of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from harness.evidence.base import Evidence, Observation
from harness.evidence.engine import EngineFacts
from harness.evidence.repetitions import RepetitionsOfRounds


class RequestObservation(Evidence):
    """One finished request. `T` is the number of generated tokens, `K` the number of top tokens."""

    id: str
    prompt: str
    round: int
    num_prompt_tokens: int
    token_ids: list[int]  # (T,)
    logprobs: list[float]  # (T,), of the generated token, nats
    top_token_ids: list[list[int]]  # (T, K), most likely first
    top_logprobs: list[list[float]]  # (T, K), nats
    num_cached_tokens: int
    num_preemptions: int
    finish_reason: str | None
    ttft_ms: float | None
    e2el_ms: float | None


class Step(Evidence):
    """One engine step as the scheduler reported it."""

    round: int
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    preempted_requests: int
    kv_cache_usage: float
    cudagraph_runtime_mode: str | None
    padded_tokens: int | None


class EngineObservation(Observation):
    """What one cell saw of one engine."""

    kind: Literal["engine"] = "engine"
    facts: EngineFacts
    requests: list[RequestObservation]
    steps: list[Step]
    run_s: float
    repetitions: RepetitionsOfRounds = []  # of rounds with several times; the rest is of their first

    def sequences(self, prompts: Mapping[str, list[int]]) -> list[dict[str, Any]]:
        """Return what the reference is to score, a sequence a request (scoring/client.py).

        Args:
            prompts: token ids by name.
        """
        return [
            {
                "prompt_token_ids": prompts[one.prompt],
                "token_ids": one.token_ids,
                "top_token_ids": one.top_token_ids,
            }
            for one in self.requests
        ]
