# SPDX-License-Identifier: Apache-2.0
"""The child of a speed matrix: an engine with random weights, timed, and what bounds it.

Run as `python -m harness.kinds.speed.child CONFIG` by harness/run/cells.py. No checkpoint is needed: vLLM fills
the weights in, and what decides the routing is drawn anew, so that tokens spread over the experts as
trained ones do; otherwise most of a batch would share four experts, and run too fast. The bound is
the time that the device takes to copy as many bytes as a step must move (step_bytes.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
import torch
from pydantic import BaseModel
from tabulate import tabulate

from harness.checkpoints.drawn import (
    DRAWN_ARGS,
    configuration_only,
    draw_parameters,
    draw_weights,
)
from harness.checkpoints.twin import (
    chosen_twin_experts,
    twin_configuration_only,
    twin_weight_bytes,
)
from harness.checkpoints.write import config_of
from harness.engine import Engine, for_any_machine
from harness.evidence.record import Gathered
from harness.kinds.speed.child.rounds import profile_decode, run_round
from harness.kinds.speed.child.routing import chosen_experts
from harness.kinds.speed.child.step_bytes import (
    StepBytes,
    distinct_experts,
    step_bytes,
    with_caches,
)
from harness.kinds.speed.observation import SpeedObservation
from harness.kinds.speed.settings import Load, RandomShape, SpeedSettings
from harness.process import child_loop
from harness.prompts.corpus import random_tokens
from vllm_metis.config import Metis16Config

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # more than any cache holds
_COPIES = 20
_PROFILED_STEPS = 4
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Start an engine of a shape, with random weights.

    Args:
        config: `settings` of one of the group's cells, and `cache`, a folder.
    """
    settings = SpeedSettings.model_validate(config["settings"])
    checkpoint = settings.checkpoint
    write, draw = configuration_only, draw_weights
    if checkpoint.twin:
        write, draw = twin_configuration_only, draw_parameters
    folder = write(Path(config["cache"]), checkpoint.shape, checkpoint.dtype)
    engine = Engine(str(folder), for_any_machine({**settings.engine.args, **DRAWN_ARGS}))
    startup_s = time.time() - psutil.Process().create_time()
    engine.apply(lambda model: draw(model, checkpoint.seed))
    copy_bytes_s = copy_bandwidth(_device())

    def handle(job: dict[str, Any]) -> BaseModel:
        asked = SpeedSettings.model_validate(job["settings"])
        seen = _observe(engine, asked.checkpoint, asked.speed, startup_s, copy_bytes_s)
        return Gathered[SpeedObservation](observation=seen)

    return {}, handle


def _observe(
    engine: Engine, checkpoint: RandomShape, load: Load, startup_s: float, copy_bytes_s: float
) -> SpeedObservation:
    config = Metis16Config(**config_of(checkpoint.shape))
    draw = Random(load.seed)
    # A round more than is timed: in the first one, kernels are tuned for its shapes.
    prompts = [
        [random_tokens(draw, load.prompt_tokens, config.vocab_size) for _ in range(load.streams)]
        for _ in range(1 + load.rounds)
    ]
    _, *rounds = [run_round(engine, one, load.max_tokens) for one in prompts]
    kernels = profile_decode(engine, prompts[0], _PROFILED_STEPS) if load.profile else []
    print(tabulate([kernel.model_dump() for kernel in kernels], headers="keys"), flush=True)

    decoding = load.phase == "decode"
    ids = rounds[-1].last_token_ids if decoding else [id_ for one in prompts[-1] for id_ in one]
    chosen = chosen_twin_experts if checkpoint.twin else chosen_experts
    facts = engine.facts
    return SpeedObservation(
        settings=facts,
        rounds=rounds,
        prompt_tokens=load.prompt_tokens,
        startup_s=startup_s,
        memory_bytes=_memory_bytes(),
        copy_bytes_s=copy_bytes_s,
        bytes_moved=_moved(engine, config, checkpoint, load).total,
        distinct_experts=(
            engine.apply(lambda model: chosen(model, ids)),
            distinct_experts(config.num_experts, config.num_experts_per_tok, len(ids)),
        ),
        kernels=kernels,
    )


def _moved(engine: Engine, config: Metis16Config, checkpoint: RandomShape, load: Load) -> StepBytes:
    """Return the least that a step, or the prefill, must move."""
    decoding = load.phase == "decode"
    new_tokens = 1 if decoding else load.prompt_tokens
    context = load.prompt_tokens + load.max_tokens / 2 if decoding else 0
    facts = engine.facts
    dtype = "fp8" if facts.quantization else _PRECISIONS[facts.dtype]
    if not checkpoint.twin:
        return step_bytes(config, dtype, load.streams, new_tokens, context)
    tokens, experts = load.streams * new_tokens, config.num_experts
    share = distinct_experts(experts, config.num_experts_per_tok, tokens) / experts
    weights = engine.apply(lambda model: twin_weight_bytes(model, tokens, share))
    return with_caches(config, dtype, weights, load.streams, new_tokens, context)


def copy_bandwidth(device: str) -> float:
    """Return bytes per second of a copy on a device, those read and those written counted."""
    source = torch.ones(_COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        _synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / median(seconds)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory_bytes() -> int:
    """Memory in use: of the card, whoever uses it, or of this process on a CPU."""
    if not torch.cuda.is_available():
        return int(psutil.Process().memory_info().rss)
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    child_loop.main(build)
