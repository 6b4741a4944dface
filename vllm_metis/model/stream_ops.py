# SPDX-License-Identifier: Apache-2.0
"""The operators between two sublayers, as vLLM and torch.compile see them.

    write_read    a sublayer's output is written back, and the next one reads a normed mixture
    write_mean    a sublayer's output is written back, and the mean taken for the depth memory
    read_memory   an output, if one is left, is written back; the depth memory is read; the next
                  sublayer, or the head, reads a normed mixture

They take plain tensors and are opaque to the compiler: what it made of these steps stored a mean in
one loop and loaded it in the next, where another thread could be late, and kept FP32 streams in
memory between its kernels. CUDA runs `stream_kernel`, the CPU `streams`; `VLLM_METIS_FUSED=0` makes
CUDA run `streams` too, to compare the two.

Letters: `T` tokens, `S` streams, `D` hidden size, `P` passes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_metis.model import streams as plain
from vllm_metis.model.switches import fused


class Unwritten(NamedTuple):
    """Streams to which the output of the last sublayer has yet to be written back.

    Attributes:
        streams: (T, S, D), model dtype, as the sublayer read them.
        output: (T, D), model dtype; None where everything is written.
        mix, write: (S, S) and (S,), float32, of the sublayer's hyper-connection in this pass.
    """

    streams: torch.Tensor
    output: torch.Tensor | None = None
    mix: torch.Tensor | None = None
    write: torch.Tensor | None = None


class Reading(NamedTuple):
    """How a mixture of the streams is read.

    Attributes:
        read: (S,), float32, sums to one; None for the mean.
        norm_weight: (D,), of the RMSNorm behind it.
        eps: of the RMSNorm.
    """

    read: torch.Tensor | None
    norm_weight: torch.Tensor
    eps: float


class Entry(NamedTuple):
    """One entry of the depth memory, as streams meet it (`DepthMemory.write`).

    Attributes:
        key_value: (T, 2D), model dtype: the key against which streams are held, then the value
            that is added to them.
        bias: (T,), float32, added to the product of a stream and the key.
    """

    key_value: torch.Tensor
    bias: torch.Tensor


class Gates(NamedTuple):
    """How much of what it reads of the memory each stream takes.

    Attributes:
        scale: of the attention's logits.
        gate: (S, D), model dtype.
        bias: (S,), model dtype.
    """

    scale: float
    gate: torch.Tensor
    bias: torch.Tensor


class MemoryRead(NamedTuple):
    """What a read of the memory gives.

    Attributes:
        streams: (T, S, D), model dtype, with the gated read added.
        mean: (T, D), model dtype, of these streams.
        summary: (T, D), model dtype, mean of the ungated reads; zeros for an empty memory.
        normed: (T, D), model dtype, normed mixture of these streams.
    """

    streams: torch.Tensor
    mean: torch.Tensor
    summary: torch.Tensor
    normed: torch.Tensor


def write_read(unwritten: Unwritten, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the streams with the output written back, (T, S, D), and their normed mixture, (T, D)."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.vllm.metis_write_read(*unwritten, *reading)
    return found


def write_mean(unwritten: Unwritten) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the streams with the output written back, (T, S, D), and their mean, (T, D)."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.vllm.metis_write_mean(*unwritten)
    return found


def read_memory(
    unwritten: Unwritten, bank: Sequence[Entry], gates: Gates, reading: Reading
) -> MemoryRead:
    """Read every entry of `bank` into the streams, after the output was written back to them."""
    key_values, biases = [one.key_value for one in bank], [one.bias for one in bank]
    return MemoryRead(
        *torch.ops.vllm.metis_read_memory(*unwritten, key_values, biases, *gates, *reading)
    )


def _pair(streams: torch.Tensor, output: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(streams), torch.empty_like(output)


def _four(streams: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    tokens, _count, width = streams.shape
    return torch.empty_like(streams), *(streams.new_empty((tokens, width)) for _ in range(3))


def _register() -> None:
    form: Any = plain
    if fused():
        from vllm_metis.model import stream_kernel as form
    operators: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
        "write_read": _pair,
        "write_mean": _pair,
        "read_memory": _four,
    }
    for name, shapes in operators.items():
        direct_register_custom_op(f"metis_{name}", getattr(form, name), fake_impl=shapes)


_register()
