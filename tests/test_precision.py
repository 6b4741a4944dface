# SPDX-License-Identifier: Apache-2.0
"""What must be FP32 in a BF16 model is: each operator on inputs where BF16 arithmetic shows.

Twice the rounding of BF16 hides such a fault in every parity cell. So an operator gets BF16 tensors
as the model hands them over, and its result is held against the same formula in float64: what FP32
is off there is a thousandth of what BF16 is (docs/model.md, "Precision").
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.loaded_weights.command import before_packing
from vllm_metis.model import router, streams
from vllm_metis.model.depth_memory import Continuation, DepthMemory
from vllm_metis.model.metis16 import Metis16DecoderLayer
from vllm_metis.model.stream_ops import Unwritten

T, S, D, E, R = 64, 4, 96, 16, 24
FP32_LIMIT = 3e-6
"""Relative; FP32 is off by 1e-7 to 6e-7 here, BF16 by 3e-3 and more."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(found: Tensor, exact: Tensor) -> float:
    """Return the largest error, relative to the largest value."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def router_logits(dtype: torch.dtype) -> Tensor:
    latent, features, bias = draw(T, 32), draw(T, R, seed=1), draw(E, seed=3).float()
    weight = draw(E, 32 + R, seed=2, dtype=torch.float32)
    if dtype == torch.float32:
        return router.route(latent, features, weight, bias)
    joined = torch.cat([latent, features], dim=-1).to(dtype)
    return F.linear(joined, weight.to(dtype), bias.to(dtype))


def expert_weights(dtype: torch.dtype) -> Tensor:
    logits = draw(T, E, dtype=torch.float32).to(dtype)
    bias = torch.zeros(E, dtype=dtype)
    return router.select(logits, bias, 4)[0]


def description(dtype: torch.dtype, what: str) -> Tensor:
    logits = draw(T, E, dtype=torch.float32).to(dtype)
    weights, experts = router.select(logits, torch.zeros(E, dtype=dtype), 4)
    embeddings, history = draw(E, R, seed=5), torch.zeros(T, R)
    if dtype == torch.float32:
        found: Tensor = getattr(
            router.describe(logits, weights, experts, embeddings, history), what
        )
        return found
    chosen, p = embeddings[experts].to(dtype), logits.softmax(-1)
    return {
        "coalition": (weights[..., None] * chosen).sum(1),
        "entropy": -(p * p.clamp(min=1e-9).log()).sum(-1, keepdim=True) / math.log(E),
        "confidence": p.amax(-1, keepdim=True),
    }[what]


def memory_weights(dtype: torch.dtype) -> Tensor:
    keys, biases = draw(T, 5, D, seed=1), draw(T, 5, seed=2, dtype=torch.float32)
    if dtype == torch.float32:
        return streams.attend(draw(T, S, D), keys, biases, 0.1)
    products = torch.einsum("tsd,tnd->tsn", draw(T, S, D).to(dtype), keys.to(dtype))
    return ((products + biases.to(dtype)[:, None]) * 0.1).softmax(-1)


def memory_gates(dtype: torch.dtype) -> Tensor:
    gate, bias = draw(S, D, seed=1), draw(S, seed=2)
    if dtype == torch.float32:
        return streams.gates(draw(T, S, D), gate, bias)
    products = (draw(T, S, D).to(dtype) * gate.to(dtype)).sum(-1)
    return (products / math.sqrt(D) + bias.to(dtype)).sigmoid()


@pytest.mark.parametrize(
    "compute",
    [
        router_logits,
        expert_weights,
        lambda dtype: description(dtype, "coalition"),
        lambda dtype: description(dtype, "entropy"),
        lambda dtype: description(dtype, "confidence"),
        memory_weights,
        memory_gates,
    ],
    ids=["router", "weights", "coalition", "entropy", "confidence", "memory", "gates"],
)
def test_what_is_fp32_always_is_off_by_fp32_alone(compute: Callable[[torch.dtype], Tensor]):
    exact = compute(torch.float64)
    found = compute(torch.float32)
    assert found.dtype == torch.float32
    assert off(found, exact) < FP32_LIMIT
    assert off(compute(torch.bfloat16), exact) > 300 * FP32_LIMIT, "BF16 would not show"


# What is stored in BF16 is rounded once: all but a few values, those that lie between two neighbours
# to within FP32's rounding, are the exact result's nearest. Rounding each step moves a third of them.
ROUNDED_OTHERWISE = 0.01


def written(dtype: torch.dtype) -> Tensor:
    mix = draw(S, S, seed=1, dtype=torch.float32).softmax(-1)
    write = draw(S, seed=2, dtype=torch.float32).softmax(-1)
    before, output = draw(T, S, D), draw(T, D, seed=3)
    if dtype == torch.float32:
        return streams.write_streams(before, output, mix, write)
    mixed = torch.einsum("oi,tid->tod", mix.to(dtype), before.to(dtype))
    return mixed + write.to(dtype)[:, None] * output.to(dtype)[:, None]


def mean(dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return streams.stream_mean(draw(T, S, D))
    one, two, three, four = draw(T, S, D).to(dtype).unbind(1)
    return (((one + two) + three) + four) / S


def normed(dtype: torch.dtype) -> Tensor:
    read, weight = draw(S, seed=1, dtype=torch.float32).softmax(-1), draw(D, seed=2)
    if dtype == torch.float32:
        return streams.read_normed(draw(T, S, D), read, weight, 1e-6)
    mixture = torch.einsum("s,tsd->td", read.to(dtype), draw(T, S, D).to(dtype))
    scale = (mixture.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return mixture * scale * weight.to(dtype)


def remembered(dtype: torch.dtype, place: int) -> Tensor:
    key_values = [draw(T, 2 * D, seed=7 + n) for n in range(5)]
    biases = [draw(T, seed=20 + n, dtype=torch.float32) for n in range(5)]
    gate, bias = draw(S, D, seed=1), draw(S, seed=2)
    if dtype == torch.float32:
        return streams.remember(draw(T, S, D), key_values, biases, 0.02, gate, bias)[place]
    before = draw(T, S, D).to(dtype)
    keys, values = torch.stack(key_values, 1).to(dtype).chunk(2, -1)
    logits = torch.einsum("tsd,tnd->tsn", before, keys) + torch.stack(biases, 1).to(dtype)[:, None]
    y = torch.einsum("tsn,tnd->tsd", (logits * 0.02).softmax(-1), values)
    gates = ((before * gate.to(dtype)).sum(-1) / math.sqrt(D) + bias.to(dtype)).sigmoid()
    return (before + gates[..., None] * y, y.mean(1))[place]


@pytest.mark.parametrize(
    "compute",
    [written, mean, normed, lambda d: remembered(d, 0), lambda d: remembered(d, 1)],
    ids=["written", "mean", "normed", "remembered", "summary"],
)
def test_what_is_stored_in_bf16_is_rounded_once(compute: Callable[[torch.dtype], Tensor]):
    nearest = compute(torch.float64).bfloat16()
    found = compute(torch.float32)
    assert found.dtype == torch.bfloat16
    assert (found != nearest).double().mean() < ROUNDED_OTHERWISE
    stepwise = compute(torch.bfloat16)
    assert (stepwise != nearest).double().mean() > 10 * ROUNDED_OTHERWISE, "BF16 would not show"


@pytest.fixture(scope="module")
def model(checkpoint):
    """The model in BF16, loaded on a CPU."""
    from vllm import EngineArgs
    from vllm.model_executor.layers.linear import LinearBase

    folder = checkpoint("tiny", dtype="bfloat16")
    with before_packing(EngineArgs(str(folder), skip_tokenizer_init=True)) as loaded:
        for module in loaded.modules():
            if isinstance(module, LinearBase):
                module.cpu_linear = F.linear  # what vLLM puts in its place while packing
        yield loaded.model


def test_history_is_kept_in_fp32(model, monkeypatch):
    """What routers are told of the layers before is the exact running mean of the coalitions."""
    config, tokens = model.config, 7
    coalitions: list[Tensor] = []
    seen: list[Tensor] = []

    def layer(self: Any, read: Any, inputs: Any, pass_index: int) -> Any:
        seen.append(inputs.history)
        logits = draw(tokens, E, seed=len(coalitions), dtype=torch.float32)
        embeddings = draw(E, config.route_feature_dim, seed=5)
        _, routing = router.choose(logits, torch.zeros(E), embeddings, inputs.history, 4)
        coalitions.append(routing.coalition)
        return Unwritten(read.streams), routing

    def features(self: Any, *arguments: Tensor) -> Tensor:
        seen.append(arguments[-1])
        return torch.zeros(tokens, config.route_feature_dim, dtype=torch.bfloat16)

    monkeypatch.setattr(Metis16DecoderLayer, "forward", layer)
    monkeypatch.setattr(DepthMemory, "pass_features", features)
    monkeypatch.setattr(
        "vllm_metis.model.metis16.write_mean", lambda one: (one.streams, one.streams[:, 0])
    )
    embedded = draw(tokens, config.hidden_size)
    model.forward(None, torch.arange(tokens), inputs_embeds=embedded)

    history = torch.zeros(tokens, config.route_feature_dim, dtype=torch.float64)
    told = iter(seen)
    for number, coalition in enumerate(coalitions):
        if number == config.num_hidden_layers:  # the end of the first pass
            assert off(next(told), history) < FP32_LIMIT
        found = next(told)
        assert found.dtype == torch.float32
        if number:
            assert off(found, history) < FP32_LIMIT
        history = 0.5 * history + 0.5 * coalition.double()
    assert len(coalitions) == config.num_passes * config.num_hidden_layers
    assert next(told, None) is None


def test_the_continuation_is_computed_in_fp32(model):
    head: Continuation = model.continuation
    features = model.config.route_feature_dim
    width = model.config.hidden_size
    mean, summary, difference = (draw(T, width, seed=n) for n in range(3))
    told = draw(T, features, seed=3)
    found = head(mean, summary, difference, told)
    assert found.dtype == torch.float32

    def compute(dtype: torch.dtype) -> Tensor:
        a, b, c, d = (one.to(dtype) for one in (mean, summary, difference, told))
        hidden, output = head.hidden, head.output
        h = F.silu(F.linear(torch.cat([a, b, c, d], -1), *cast(hidden, dtype)))
        change = rms(c) / rms(a)
        logit = F.linear(h, *cast(output, dtype)) + change.tanh() - 0.5
        return logit.clamp(-head.limit, head.limit).sigmoid()

    def cast(linear: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return linear.weight.to(dtype), linear.bias.to(dtype)

    def rms(x: Tensor) -> Tensor:
        return x.square().mean(-1, keepdim=True).sqrt()

    assert off(found, compute(torch.float64)) < FP32_LIMIT
    assert off(compute(torch.bfloat16), compute(torch.float64)) > 300 * FP32_LIMIT
