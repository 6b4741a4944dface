# SPDX-License-Identifier: Apache-2.0
"""The operators between two sublayers: their two forms agree, and compute in FP32.

Where there is a card the kernel runs on it, elsewhere in Triton's interpreter.
"""

import importlib
import math
import os
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_metis.model import stream_ops, streams, switches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, S = 3, 4
# The interpreter cuts off what does not fit into BF16, where a card rounds.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("set TRITON_INTERPRET=1, as nox does: without a card nothing else runs it")
    return importlib.import_module("vllm_metis.model.stream_kernel")


class Case:
    """Arguments of the operators, drawn at random; `width` is D."""

    def __init__(self, dtype: torch.dtype, width: int, entries: int = 0, seed: int = 1):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(shape, generator=generator) * scale
            return values.to(dtype).to(DEVICE)

        wide = torch.float32
        self.streams, self.output = draw(T, S, width), draw(T, width)
        self.mix = draw(S, S, dtype=wide).softmax(-1)
        self.write, self.read = (draw(S, dtype=wide).softmax(-1) for _ in range(2))
        self.norm_weight, self.eps = draw(width), 1e-6
        scale = width**-0.5
        self.key_values = [draw(T, 2 * width, scale=scale) for _ in range(entries)]
        self.biases = [draw(T, dtype=wide) for _ in range(entries)]
        self.scale, self.gate, self.gate_bias = 0.7, draw(S, width), draw(S)

    @property
    def unwritten(self) -> tuple[torch.Tensor, ...]:
        return self.streams, self.output, self.mix, self.write

    @property
    def bank(self) -> tuple[Any, ...]:
        return self.key_values, self.biases, self.scale, self.gate, self.gate_bias

    @property
    def reading(self) -> tuple[Any, ...]:
        return self.read, self.norm_weight, self.eps


def assert_same(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    """Equal but for the order of sums, after which a BF16 value may be its neighbour."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == dtype
        limit = 2e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


# Of one block, of two, and of two the second of which is not full.
WIDTHS = [64, 96, 80]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_and_plain_form_write_back_the_same(kernel, dtype, width):
    case = Case(dtype, width)
    for name, more in (("write_read", case.reading), ("write_mean", ())):
        found = getattr(kernel, name)(*case.unwritten, *more)
        assert_same(found, getattr(streams, name)(*case.unwritten, *more), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("width", "entries"), [(64, 0), (96, 5), (80, 1)])
def test_kernel_and_plain_form_read_the_same(kernel, dtype, written, width, entries):
    case = Case(dtype, width, entries)
    unwritten = (case.streams, None, None, None) if written else case.unwritten
    for reading in (case.reading, (None, *case.reading[1:])):
        found = kernel.read_memory(*unwritten, *case.bank, *reading)
        assert_same(found, streams.read_memory(*unwritten, *case.bank, *reading), dtype)


@pytest.mark.parametrize("entries", [0, 2])
def test_operators_return_new_memory(entries):
    case = Case(torch.float32, 64, entries)
    before = case.streams.clone()
    unwritten = stream_ops.Unwritten(case.streams)
    bank = [stream_ops.Entry(*one) for one in zip(case.key_values, case.biases, strict=True)]
    gates, reading = stream_ops.Gates(*case.bank[2:]), stream_ops.Reading(*case.reading)
    read = stream_ops.read_memory(unwritten, bank, gates, reading)
    assert read.streams.data_ptr() != case.streams.data_ptr()
    assert torch.equal(case.streams, before)


def test_operators_are_what_the_compiler_is_told(monkeypatch):
    """Shapes and dtypes without the data, and no argument that is changed or returned."""
    case = Case(torch.bfloat16, 64, 2)
    for name, arguments in (
        ("write_read", (*case.unwritten, *case.reading)),
        ("write_mean", case.unwritten),
        ("read_memory", (*case.unwritten, *case.bank, *case.reading)),
    ):
        operator = getattr(torch.ops.vllm, f"metis_{name}").default
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_without_tokens_nothing_is_computed(kernel):
    case = Case(torch.float32, 64)
    none = [one[:0] for one in (case.streams, case.output)]
    streams_after, normed = kernel.write_read(*none, case.mix, case.write, *case.reading)
    assert streams_after.shape == (0, S, 64)
    assert normed.shape == (0, 64)


def test_an_empty_memory_changes_no_stream_and_sums_up_to_zero():
    case = Case(torch.bfloat16, 64)
    read, _, summary, _ = streams.read_memory(
        case.streams, None, None, None, *case.bank, *case.reading
    )
    assert torch.equal(read, case.streams)
    assert not summary.any()


def test_the_switch_takes_0_and_1_and_names_what_else_it_was_given(monkeypatch):
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_METIS_FUSED", value)
        assert switches.fused() == (value == "1" and DEVICE == "cuda")
    monkeypatch.setenv("VLLM_METIS_FUSED", "off")
    with pytest.raises(ValueError, match=r"'off': expected 1 .* or 0"):
        switches.fused()


def test_a_read_is_what_the_models_description_says():
    """Independent of both forms: docs/model.md 2.1 to 2.3, stream by stream, in float64."""
    case = Case(torch.float32, 64, 3)
    read, mean, summary, normed = streams.read_memory(*case.unwritten, *case.bank, *case.reading)
    for token in range(T):
        before = case.streams[token].double()
        written = case.mix.double() @ before + torch.outer(
            case.write.double(), case.output[token].double()
        )
        after, reads = [], []
        for s in written:
            keys = [one[token, :64].double() for one in case.key_values]
            values = [one[token, 64:].double() for one in case.key_values]
            logits = [
                float(s @ key + bias[token].double()) * case.scale
                for key, bias in zip(keys, case.biases, strict=True)
            ]
            weights = [math.exp(one) / sum(map(math.exp, logits)) for one in logits]
            reads.append(sum(w * value for w, value in zip(weights, values, strict=True)))
            i = len(after)
            logit = float(s @ case.gate[i].double()) / 8 + float(case.gate_bias[i])
            after.append(s + reads[-1] / (1 + math.exp(-logit)))
        mixture = sum(float(r) * s for r, s in zip(case.read, after, strict=True))
        wanted = mixture / (mixture.square().mean() + case.eps).sqrt() * case.norm_weight.double()
        for found, right in (
            (read[token], torch.stack(after)),
            (mean[token], sum(after) / S),
            (summary[token], sum(reads) / S),
            (normed[token], wanted),
        ):
            torch.testing.assert_close(found.double(), right.double(), rtol=1e-5, atol=1e-5)
