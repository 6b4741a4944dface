# SPDX-License-Identifier: Apache-2.0
"""All that happens to a token's streams between two sublayers, as one Triton kernel.

One program computes one token and keeps all of it in registers. It loads everything first, since a
token's rows lie apart and each trip to memory would otherwise wait for the one before, and it loads
nothing that it stores, so no thread can be late with what another one needs. Tiles follow from the
width alone and nothing is tuned, so a token gets the same bits whatever stands beside it.

A row of D values is one block, or two where D is no power of two, since padding costs registers:
2560 is 2048 and 512.

`streams` is the same in plain PyTorch, step by step.

Source: docs/model.md, forward pass 2.1, 2.3, 2.5, 2.6 and 2.8.
"""

import math

import torch
import triton
import triton.language as tl

STREAMS = 4
"""The count that `_add4` is written for."""

_PER_THREAD = 8
"""Values of a row: 16 bytes in BF16, the widest load."""


@triton.jit
def _load(row_ptr, D: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return a row as its blocks, in the dtype in which it is stored."""
    row = (tl.load(row_ptr + tl.arange(0, FIRST)),)
    if SECOND > 0:
        column = FIRST + tl.arange(0, SECOND)
        row = row + (tl.load(row_ptr + column, mask=column < D, other=0.0),)
    return row


@triton.jit
def _store(row_ptr, row, D: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    tl.store(row_ptr + tl.arange(0, FIRST), row[0])
    if SECOND > 0:
        column = FIRST + tl.arange(0, SECOND)
        tl.store(row_ptr + column, row[1], mask=column < D)


@triton.jit
def _joined(row, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return one block that has the sum of a row's values; each thread joins its own."""
    joined = row[0]
    if SECOND > 0 and SECOND < FIRST:
        joined = tl.sum(tl.reshape(joined, [SECOND, FIRST // SECOND]), axis=1)
    if SECOND > 0:
        joined += row[1]
    return joined


@triton.jit
def _add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _products(rows, others, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return Σ_d rows[s][d]·others[s][d] for each of the four streams."""
    sums = ()
    for s in tl.static_range(4):
        product = ()
        for c in tl.static_range(len(rows[s])):
            product = product + (rows[s][c] * others[s][c].to(tl.float32),)
        sums = sums + (_joined(product, FIRST, SECOND),)
    return tl.reduce(sums, 0, _add4)


@triton.jit
def _weighted(rows, weights):
    """Return Σ_s weights[s]·rows[s], a row in FP32."""
    found = ()
    for c in tl.static_range(len(rows[0])):
        total = weights[0] * rows[0][c].to(tl.float32)
        for s in tl.static_range(1, len(rows)):
            total += weights[s] * rows[s][c].to(tl.float32)
        found = found + (total,)
    return found


@triton.jit
def _rounded(row, dtype: tl.constexpr):
    """Return a row in FP32 as it is once it was stored."""
    found = ()
    for c in tl.static_range(len(row)):
        found = found + (row[c].to(dtype).to(tl.float32),)
    return found


@triton.jit
def _between_sublayers(
    streams_ptr,  # (T, S, D)
    output_ptr,  # (T, D)
    mix_ptr,  # (S, S)
    write_ptr,  # (S,)
    key_value_ptrs,  # of each entry, (T, 2D)
    bias_ptrs,  # of each entry, (T,)
    gate_ptr,  # (S, D)
    gate_bias_ptr,  # (S,)
    read_ptr,  # (S,), or None for the mean
    norm_weight_ptr,  # (D,)
    new_streams_ptr,  # (T, S, D)
    mean_ptr,  # (T, D)
    summary_ptr,  # (T, D)
    normed_ptr,  # (T, D)
    scale,
    gate_scale,
    eps,
    D: tl.constexpr,
    ENTRIES: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    WRITE: tl.constexpr,
    MEAN: tl.constexpr,
    REMEMBER: tl.constexpr,
    READ: tl.constexpr,
):
    S: tl.constexpr = 4
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = new_streams_ptr.dtype.element_ty

    rows, keys, values = (), (), ()
    for s in tl.static_range(S):
        rows = rows + (_load(streams_ptr + (token * S + s) * D, D, FIRST, SECOND),)
    if WRITE:
        output = _load(output_ptr + token * D, D, FIRST, SECOND)
    for n in tl.static_range(ENTRIES):
        keys = keys + (_load(key_value_ptrs[n] + token * 2 * D, D, FIRST, SECOND),)
    for n in tl.static_range(ENTRIES):
        values = values + (_load(key_value_ptrs[n] + token * 2 * D + D, D, FIRST, SECOND),)

    # S_o = Σ_i mix[o,i]·S_i + write_o·output
    tiles = ()
    for o in tl.static_range(S):
        if WRITE:
            parts, shares = rows + (output,), ()
            for i in tl.static_range(S):
                shares = shares + (tl.load(mix_ptr + o * S + i),)
            tile = _weighted(parts, shares + (tl.load(write_ptr + o),))
        else:
            tile = rows[o]
        tiles = tiles + (_rounded(tile, dtype),)

    # S_i += gate_i · Σ_n w_in·value_n; summary = mean_i Σ_n w_in·value_n
    if REMEMBER:
        if ENTRIES > 0:
            gate_rows = ()
            for s in tl.static_range(S):
                gate_rows = gate_rows + (_load(gate_ptr + s * D, D, FIRST, SECOND),)
            gate_logits = _products(tiles, gate_rows, FIRST, SECOND)
            logits = ()
            for n in tl.static_range(ENTRIES):
                bias = tl.load(bias_ptrs[n] + token)
                products = _products(tiles, (keys[n], keys[n], keys[n], keys[n]), FIRST, SECOND)
                of_entry = ()
                for s in tl.static_range(S):
                    of_entry = of_entry + ((products[s] + bias) * scale,)
                logits = logits + (of_entry,)
            read_tiles, mean_weights = (), ()
            for s in tl.static_range(S):
                largest = logits[0][s]
                for n in tl.static_range(1, ENTRIES):
                    largest = tl.maximum(largest, logits[n][s])
                weights, total = (), 0.0
                for n in tl.static_range(ENTRIES):
                    weight = tl.exp(logits[n][s] - largest)
                    weights = weights + (weight,)
                    total += weight
                gate_bias = tl.load(gate_bias_ptr + s).to(tl.float32)
                gate = tl.sigmoid(gate_logits[s] * gate_scale + gate_bias)
                gated, shares = (1.0,), ()
                for n in tl.static_range(ENTRIES):
                    share = weights[n] / total
                    gated = gated + (gate * share,)
                    if s == 0:
                        shares = shares + (share / S,)
                    else:
                        shares = shares + (mean_weights[n] + share / S,)
                mean_weights = shares
                read_tile = _weighted((tiles[s],) + values, gated)
                read_tiles = read_tiles + (_rounded(read_tile, dtype),)
            summary = _weighted(values, mean_weights)
            tiles = read_tiles
        else:
            summary = _weighted((tiles[0],), (0.0,))
        _store(summary_ptr + token * D, summary, D, FIRST, SECOND)

    for s in tl.static_range(S):
        _store(new_streams_ptr + (token * S + s) * D, tiles[s], D, FIRST, SECOND)
    mean = _weighted(tiles, (1.0 / S, 1.0 / S, 1.0 / S, 1.0 / S))
    if MEAN:
        _store(mean_ptr + token * D, mean, D, FIRST, SECOND)

    # RMSNorm(Σ_i read_i·S_i); the last one of their mean
    if READ:
        norm_weight = _load(norm_weight_ptr, D, FIRST, SECOND)
        mixture = mean
        if read_ptr is not None:
            shares = ()
            for s in tl.static_range(S):
                shares = shares + (tl.load(read_ptr + s),)
            mixture = _weighted(tiles, shares)
        squares, normed = (), ()
        for c in tl.static_range(len(mixture)):
            squares = squares + (mixture[c] * mixture[c],)
        factor = tl.rsqrt(tl.sum(_joined(squares, FIRST, SECOND), axis=0) / D + eps)
        for c in tl.static_range(len(mixture)):
            normed = normed + (mixture[c] * factor * norm_weight[c].to(tl.float32),)
        _store(normed_ptr + token * D, normed, D, FIRST, SECOND)


def _launch(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    mix: torch.Tensor | None,
    write: torch.Tensor | None,
    *,
    mean: torch.Tensor | None = None,
    memory: tuple[list[torch.Tensor], list[torch.Tensor], float, torch.Tensor, torch.Tensor]
    | None = None,
    summary: torch.Tensor | None = None,
    norm: tuple[torch.Tensor | None, torch.Tensor, float] | None = None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel on every token; fill the tensors given, and return the new streams."""
    tokens, count, width = streams.shape
    if count != STREAMS:
        raise ValueError(
            f"the kernel is written for {STREAMS} streams, and the model has {count}; "
            "VLLM_METIS_FUSED=0 runs plain PyTorch, which takes any number"
        )
    new_streams = torch.empty_like(streams)
    if tokens == 0:
        return new_streams
    key_values, biases, scale, gate, gate_bias = memory or ([], [], 0.0, None, None)
    read, norm_weight, eps = norm or (None, None, 0.0)
    first = 1 << (width.bit_length() - 1)
    second = triton.next_power_of_2(width - first) if width > first else 0
    _between_sublayers[(tokens,)](
        streams,
        output,
        mix,
        write,
        tuple(key_values),
        tuple(biases),
        gate,
        gate_bias,
        read,
        norm_weight,
        new_streams,
        mean,
        summary,
        normed,
        scale,
        1.0 / math.sqrt(width),
        eps,
        D=width,
        ENTRIES=len(key_values),
        FIRST=first,
        SECOND=second,
        WRITE=output is not None,
        MEAN=mean is not None,
        REMEMBER=summary is not None,
        READ=normed is not None,
        num_warps=min(max(first // (32 * _PER_THREAD), 1), 8),
    )
    return new_streams


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
    normed = torch.empty_like(output)
    norm = read, norm_weight, eps
    return _launch(streams, output, mix, write, norm=norm, normed=normed), normed


def write_mean(
    streams: torch.Tensor, output: torch.Tensor, mix: torch.Tensor, write: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `stream_ops.write_mean`."""
    mean = torch.empty_like(output)
    return _launch(streams, output, mix, write, mean=mean), mean


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
    tokens, _, width = streams.shape
    mean, summary, normed = (streams.new_empty((tokens, width)) for _ in range(3))
    new_streams = _launch(
        streams,
        output,
        mix,
        write,
        mean=mean,
        memory=(key_values, biases, scale, gate, gate_bias),
        summary=summary,
        norm=(read, norm_weight, eps),
        normed=normed,
    )
    return new_streams, mean, summary, normed
