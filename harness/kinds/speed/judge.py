# SPDX-License-Identifier: Apache-2.0
"""The verdict on a speed cell: the rounds ran as it says; their speed, and the limit of memory.

Speeds have no budget: they are findings, to be compared with those of another run.
"""

from __future__ import annotations

from statistics import median

from harness.evidence.verdict import ReachFact, Verdict
from harness.judging.findings import fact, measured, missed, not_reached
from harness.kinds.speed.observation import SpeedObservation
from harness.kinds.speed.settings import SpeedSettings

SPREAD = 0.15
"""How far the experts that a step chooses may be from what even routing gives. Drawn routers are off
by 0.01 for 32 tokens of Logos, and vLLM's dummy weights, which send all to the same four, by 0.96."""


def judge(settings: SpeedSettings, observation: SpeedObservation) -> Verdict:
    """Decide whether the cell measured what it names; find the speed and the limit of memory."""
    load, args, engine = settings.speed, settings.engine.args, observation.settings
    found, expected = observation.distinct_experts
    widths = sorted({len(one.tokens) for one in observation.rounds})
    tokens = sorted({count for one in observation.rounds for count in one.tokens})
    steps = sorted({one.steps for one in observation.rounds})
    facts = [
        fact("dtype", args["dtype"], engine.dtype),
        fact("quantization", args.get("quantization"), engine.quantization),
        fact("rounds", load.rounds, len(observation.rounds)),
        fact("streams", [load.streams], widths),
        fact("prompt tokens", load.prompt_tokens, observation.prompt_tokens),
        fact("tokens generated", [load.max_tokens], tokens),
        fact("steps of a round: all streams in each", [load.max_tokens], steps),
        ReachFact(
            fact="distinct experts of a layer and step",
            expected=f"{expected:.1f}, {SPREAD:.0%} either way",
            found=f"{found:.1f}",
            reached=abs(found - expected) <= SPREAD * expected,
        ),
    ]
    if missed(facts):
        return not_reached(facts)
    limit_ms = 1e3 * observation.bytes_moved / observation.copy_bytes_s
    if load.phase == "decode":
        step_ms = median(
            (one.last_token_ms - one.first_token_ms) / (load.max_tokens - 1)
            for one in observation.rounds
        )
        times = [
            measured("decode_tok_s", 1e3 * load.streams / step_ms),
            measured("tpot_ms", step_ms),
        ]
    else:
        step_ms = median(one.first_token_ms for one in observation.rounds)
        times = [
            measured("prefill_tok_s", 1e3 * load.prompt_tokens / step_ms),
            measured("ttft_ms", step_ms),
        ]
    return Verdict(
        verdict="pass",
        reach=facts,
        findings=[
            *times,
            measured("memory_limit_ms", limit_ms),
            measured("mbu", limit_ms / step_ms),
            measured("memory_gib", observation.memory_bytes / 2**30),
            measured("startup_s", observation.startup_s),
            measured("copy_tb_s", observation.copy_bytes_s / 1e12),
        ],
    )
