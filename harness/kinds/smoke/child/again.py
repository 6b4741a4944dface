# SPDX-License-Identifier: Apache-2.0
"""Rounds that an engine is asked several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams

from harness.engine import Engine, Request
from harness.evidence.repetitions import Repetitions
from harness.kinds.settings import Round
from harness.kinds.smoke.settings import ParityCheck, SmokeSettings
from harness.repetition import Repeated


def asked_again(
    engine: Engine, settings: SmokeSettings, ids: Mapping[str, Sequence[int]], top: int
) -> list[Repetitions]:
    """Return how each round with several times came back.

    Args:
        ids: tokens of the prompts, by name.
        top: likeliest tokens of which each row gives the logprobs.
    """
    assert isinstance(settings.smoke, ParityCheck)
    assert settings.workload is not None
    found = []
    for number, round_ in enumerate(settings.workload.rounds):
        if round_.times > 1:
            params = SamplingParams(
                max_tokens=settings.smoke.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                logprobs=top,
                prompt_logprobs=top if round_.prompt_rows else None,
                detokenize=False,
            )
            found.append(_asked(engine, number, round_, ids, params))
    return found


def _asked(
    engine: Engine,
    number: int,
    round_: Round,
    ids: Mapping[str, Sequence[int]],
    params: SamplingParams,
) -> Repetitions:
    repeated = Repeated(number)
    for _ in range(round_.times):
        outputs: list[Any] = []
        steps: list[int] = []
        for batch in round_.batches():
            requests = [
                Request(f"{number}.{index}-{name}", ids[name], params, step)
                for index, name, step in batch
            ]
            answers, gave = engine.answers(requests)
            outputs += answers
            steps += gave
        repeated.add(outputs, tuple(steps))
    return repeated.found()
