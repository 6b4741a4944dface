# SPDX-License-Identifier: Apache-2.0
"""All that happens to a token's streams between two sublayers, in plain PyTorch.

`write_read`, `write_mean` and `read_memory` are what the operators of `stream_ops` compute; the
functions before them are their steps, in the order of docs/model.md. The CPU runs this form. It is
also what the kernel (`stream_kernel`) is held against, so it says what is computed, and how exactly:
streams are in the model dtype outside of an operator and in FP32 within, rounded where docs/model.md
has a new `S`.

Letters: `T` tokens, `S` streams, `D` hidden size, `N` entries of the depth memory.

Source: docs/model.md, forward pass 2.1, 2.3, 2.5, 2.6 and 2.8.
"""

import math

import torch


def write_streams(
    streams: torch.Tensor, output: torch.Tensor, mix: torch.Tensor, write: torch.Tensor
) -> torch.Tensor:
    """Return the mixed streams plus a sublayer's output: `S_o = Σ_i mix[o,i]·S_i + write_o·out`.

    Args:
        streams: (T, S, D), model dtype, as the sublayer read them.
        output: (T, D), model dtype.
        mix: (S, S), float32, doubly stochastic.
        write: (S,), float32, sums to one.

    Returns:
        (T, S, D), model dtype, rounded once.
    """
    wide = streams.float()
    written = write[:, None] * output.float()[:, None]
    # Term by term: exact FP32 on every device, where a batched product may take TF32.
    for i in range(streams.shape[1]):
        written = written + mix[:, i, None] * wide[:, i : i + 1]
    return written.to(streams.dtype)


def stream_mean(streams: torch.Tensor) -> torch.Tensor:
    """Return the mean of the streams, (T, D), model dtype, summed in FP32."""
    return streams.float().mean(1).to(streams.dtype)


def read_normed(
    streams: torch.Tensor, read: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the mixture of the streams that a sublayer sees, behind its RMSNorm.

    Args:
        streams: (T, S, D), model dtype.
        read: (S,), float32, sums to one; None for the mean.
        weight: (D,), of the norm.
        eps: of the norm.

    Returns:
        (T, D), model dtype, rounded once.
    """
    wide = streams.float()
    mixture = wide.mean(1) if read is None else (wide * read[:, None]).sum(1)
    normed = mixture * torch.rsqrt(mixture.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(streams.dtype)


def attend(
    streams: torch.Tensor, keys: torch.Tensor, biases: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return how much each stream takes of each of the token's own entries, softmax in FP32.

    Args:
        streams: (T, S, D), model dtype.
        keys: (T, N, D), model dtype.
        biases: (T, N), float32.
        scale: of the logits.

    Returns:
        (T, S, N), float32, sums to one over the entries.
    """
    # Elementwise rather than batched products: T tiny matrices each, and exact FP32.
    logits = (streams.float()[:, :, None] * keys.float()[:, None]).sum(-1) + biases[:, None]
    return (logits * scale).softmax(-1)


def gates(streams: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `sigmoid(<S_i, gate_i> / sqrt(D) + bias_i)`, (T, S), float32.

    Args:
        streams: (T, S, D), model dtype.
        gate: (S, D); bias: (S,); model dtype.
    """
    logits = (streams.float() * gate.float()).sum(-1) / math.sqrt(streams.shape[-1])
    return (logits + bias.float()).sigmoid()


def remember(
    streams: torch.Tensor,
    key_values: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the streams with the gated read added, rounded once, and the ungated mean of the reads.

    Args:
        streams: (T, S, D), model dtype.
        key_values: of each of N entries, (T, 2D), model dtype: its key, then its value.
        biases: of each entry, (T,), float32.
        scale, gate, gate_bias: see `attend` and `gates`.
    """
    if not key_values:
        return streams, torch.zeros_like(streams[:, 0])
    keys, values = torch.stack(key_values, dim=1).chunk(2, dim=-1)
    weights = attend(streams, keys, torch.stack(biases, dim=1), scale)
    y = (weights[..., None] * values.float()[:, None]).sum(2)
    gated = streams.float() + gates(streams, gate, gate_bias)[..., None] * y
    return gated.to(streams.dtype), y.mean(1).to(streams.dtype)


def write_read(
    streams: torch.Tensor,
    output: torch.Tensor,
    mix: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `stream_ops.write_read`."""
    streams = write_streams(streams, output, mix, write)
    return streams, read_normed(streams, read, norm_weight, eps)


def write_mean(
    streams: torch.Tensor, output: torch.Tensor, mix: torch.Tensor, write: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `stream_ops.write_mean`."""
    streams = write_streams(streams, output, mix, write)
    return streams, stream_mean(streams)


def read_memory(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    mix: torch.Tensor | None,
    write: torch.Tensor | None,
    key_values: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor,
    read: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `stream_ops.read_memory`."""
    if output is not None and mix is not None and write is not None:
        streams = write_streams(streams, output, mix, write)
    else:
        streams = streams.clone()  # an operator returns none of its arguments
    streams, summary = remember(streams, key_values, biases, scale, gate, gate_bias)
    mean, normed = stream_mean(streams), read_normed(streams, read, norm_weight, eps)
    return streams, mean, summary, normed
