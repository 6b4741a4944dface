# SPDX-License-Identifier: Apache-2.0
"""The child of a speed matrix: an engine with random weights, timed, and what bounds it.

Run as `python -m harness.speed CONFIG` by harness/run_cells.py. No checkpoint is needed: vLLM fills
the weights in, and what decides the routing is drawn anew, so that tokens spread over the experts as
trained ones do; otherwise most of a batch would share four experts, and run too fast. The bound is
the time that the device takes to copy as many bytes as a step must move (harness/traffic.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import psutil
import torch
from pydantic import BaseModel
from tabulate import tabulate

from harness import job_loop
from harness.checkpoint import config_of
from harness.corpus import FIRST_ORDINARY_TOKEN
from harness.measurements import SpeedObservation
from harness.own_engine import OwnEngine
from harness.quantize import FP8
from harness.records import write_atomic
from harness.traffic import distinct_experts, step_traffic
from vllm_metis.model.depth_memory import stream_mean
from vllm_metis.model.moe import route, select

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # more than any cache holds
_COPIES = 20
_PROFILED_STEPS = 4
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


class Evidence(BaseModel):
    """What a cell's record holds of it."""

    observation: SpeedObservation
    corpus: None = None
    reference: None = None


def build(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
    """Start an engine of a shape, with random weights.

    Args:
        config: `settings` of one of the group's cells, and `cache`, a folder.
    """
    settings = config["settings"]
    checkpoint = settings["checkpoint"]
    folder = _configuration_only(Path(config["cache"]), checkpoint["shape"], checkpoint["dtype"])
    args = {**settings["engine"]["args"], "load_format": "dummy", "skip_tokenizer_init": True}
    engine = OwnEngine(str(folder), args)
    startup_s = time.time() - psutil.Process().create_time()
    engine.apply(lambda model: draw_weights(model, checkpoint["seed"]))
    copy_bytes_s = copy_bandwidth(_device())

    def handle(job: dict[str, Any]) -> BaseModel:
        return Evidence(
            observation=_observe(engine, job["settings"]["speed"], startup_s, copy_bytes_s)
        )

    return {}, handle


def _observe(
    engine: OwnEngine, speed: dict[str, Any], startup_s: float, copy_bytes_s: float
) -> SpeedObservation:
    config = engine.apply(lambda model: model.config)
    draw = Random(speed["seed"])
    streams, length = speed["streams"], speed["prompt_tokens"]
    # A round more than is timed: in the first one, kernels are tuned for its shapes.
    prompts = [
        [
            [draw.randrange(FIRST_ORDINARY_TOKEN, config.vocab_size) for _ in range(length)]
            for _ in range(streams)
        ]
        for _ in range(1 + speed["rounds"])
    ]
    _, *rounds = [engine.run_round(one, speed["max_tokens"]) for one in prompts]
    kernels = engine.profile_decode(prompts[0], _PROFILED_STEPS) if speed["profile"] else []
    print(tabulate([kernel.model_dump() for kernel in kernels], headers="keys"), flush=True)

    decoding = speed["phase"] == "decode"
    ids = rounds[-1].last_token_ids if decoding else [id_ for one in prompts[-1] for id_ in one]
    settings = engine.settings
    traffic = step_traffic(
        config,
        "fp8" if settings.quantization else _PRECISIONS[settings.dtype],
        streams,
        new_tokens=1 if decoding else length,
        context=length + speed["max_tokens"] / 2 if decoding else 0,
    )
    return SpeedObservation(
        settings=settings,
        rounds=rounds,
        prompt_tokens=length,
        startup_s=startup_s,
        memory_bytes=_memory_bytes(),
        copy_bytes_s=copy_bytes_s,
        bytes_moved=traffic.total,
        distinct_experts=(
            engine.apply(lambda model: chosen_experts(model, ids)),
            distinct_experts(config.num_experts, config.num_experts_per_tok, len(ids)),
        ),
        kernels=kernels,
    )


def _configuration_only(cache: Path, shape: str, dtype: str) -> Path:
    """Write a folder with a config.json and no weights."""
    folder = cache / f"{shape}-{dtype}-configuration"
    head = {"architectures": ["Metis16ForCausalLM"], "model_type": "metis16", "torch_dtype": dtype}
    write_atomic(folder / "config.json", json.dumps(head | config_of(shape), indent=2) + "\n")
    return folder


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    """Draw weights at the scale that keeps activations at one; what is FP8 stays as vLLM filled it.

    On a CPU the linears stay too: vLLM has packed them.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dtype == FP8 or ".routed_experts." in name or name.endswith("_scale"):
            continue
        if name.endswith(".A"):
            parameter.fill_(-1.0)
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() < 2 or name.endswith("mix_logits"):
            parameter.zero_()
        else:
            # A token's own embedding must stand out from what all tokens share.
            scale = 0.1 if name.endswith("stream_embeddings") else 1.0
            parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5, generator=generator)
        seed += 1
    model.process_weights_after_loading()


@torch.inference_mode()
def chosen_experts(model: Any, token_ids: Sequence[int]) -> float:
    """Return how many experts these tokens choose in a layer, on average over the layers.

    Each layer's router is asked about the tokens' embeddings: what the mixers add in between would
    spread them further.
    """
    stack = model.model
    ids = torch.tensor(token_ids, device=stack.stream_embeddings.device)
    streams = stack.embed_input_ids(ids)[:, None] + stack.stream_embeddings
    average = stream_mean(streams)
    history = average.new_zeros((len(ids), stack.config.route_feature_dim), dtype=torch.float32)
    features = stack.depth_memory.route_features(average, torch.zeros_like(average), history)
    counts = []
    for layer in stack.layers:
        moe = layer.moe
        latent = moe.latent_down(layer.moe_connection.read_normed(streams, 0))
        logits = route(latent, features, moe.expert_router.weight, moe.expert_router.bias)
        _, experts = select(logits, moe.selection_bias, moe.top_k)
        counts.append(experts.unique().numel())
    return mean(counts)


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
    job_loop.main(build)
