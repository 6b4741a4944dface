# SPDX-License-Identifier: Apache-2.0
"""Products of a few tokens with weights, as Triton kernels: what bounds them is reading the weights.

A library's matrix product is made for many tokens; with a few of them it waits for memory with too
little under way, and splits its sums into a second kernel. Here one token meets a row of the weight
in a program that asks for the whole row before it uses any of it; more tokens meet a few rows on
tensor cores. Two products that wait for the same thing share a launch. Experts are read per token,
so a token costs the same wherever it is routed, and nothing is sorted.

Tiles follow from shapes and the card's number of multiprocessors alone and nothing is tuned by
timing, so one batch gets the same bits in every process. Sums are FP32, in a fixed order.

`few_tokens` is the same in plain PyTorch.

Letters: `T` tokens, `N` rows of a weight, `H` latent width, `E` experts, `K` top-k, `I` width of a
routed expert, `J` of the shared one.

Source: docs/model.md, forward pass 2.2, 2.4 and 2.7.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def _tile(row_ptrs, columns, WIDTH: tl.constexpr, in_rows, BLOCK: tl.constexpr):
    """Return `BLOCK` columns of some rows, zeros where there are none."""
    if WIDTH % BLOCK == 0:
        return tl.load(row_ptrs + columns[None], mask=in_rows[:, None], other=0.0)
    mask = in_rows[:, None] & (columns < WIDTH)[None]
    return tl.load(row_ptrs + columns[None], mask=mask, other=0.0)


@triton.jit
def _vector(ptr, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return `BLOCK` columns of one row, zeros where there are none."""
    if WIDTH % BLOCK == 0:
        return tl.load(ptr + columns)
    return tl.load(ptr + columns, mask=columns < WIDTH, other=0.0)


@triton.jit
def _row(
    program,
    x_ptrs,  # of each input, (1, its width); the inputs stand beside each other
    weight_ptr,  # (N, at least the sum of the widths)
    weight_stride,
    bias_ptr,  # (N,), or None
    y_ptr,  # (1, N)
    WIDTHS: tl.constexpr,
    MODEL: tl.constexpr,
    BLOCK: tl.constexpr,
    TANH: tl.constexpr,
):
    """Compute one row of `[x...] Wᵀ + b`, or of its tanh, for the only token.

    Inputs are rounded to the model dtype, `MODEL`, where they are wider.
    """
    tiles, row_ptr = (), weight_ptr + program.to(tl.int64) * weight_stride
    for s in tl.static_range(len(x_ptrs)):
        of_input = ()
        for c in tl.static_range((WIDTHS[s] + BLOCK - 1) // BLOCK):
            columns = c * BLOCK + tl.arange(0, BLOCK)
            of_input = of_input + (_vector(row_ptr, columns, WIDTHS[s], BLOCK),)
        tiles = tiles + (of_input,)
        row_ptr += WIDTHS[s]
    products = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(len(x_ptrs)):
        for c in tl.static_range((WIDTHS[s] + BLOCK - 1) // BLOCK):
            columns = c * BLOCK + tl.arange(0, BLOCK)
            x = _vector(x_ptrs[s], columns, WIDTHS[s], BLOCK).to(MODEL)
            products += tiles[s][c].to(tl.float32) * x.to(tl.float32)
    y = tl.sum(products, axis=0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + program).to(tl.float32)
    if TANH:
        y = _tanh(y)
    tl.store(y_ptr + program, y)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _wide_rows(
    program,
    x_ptr,  # (T, K)
    weight_ptr,  # (N, K)
    y_ptr,  # (T, N)
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute some rows of `x Wᵀ` for all tokens at once, the warps beside each other."""
    rows, token = program * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    in_rows, in_tokens = rows < N, token < tokens
    row_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * K
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        x = _tile(x_ptr + token[:, None] * K, columns, K, in_tokens, BLOCK)
        weight = _tile(row_ptrs, columns, K, in_rows, BLOCK)
        total = tl.dot(x, weight.T, total, input_precision="ieee")
    mask = in_tokens[:, None] & in_rows[None]
    tl.store(y_ptr + token[:, None] * N + rows[None], total, mask=mask)


@triton.jit
def _dot(x, weight, total):
    """Return `total + x weight`, with no rounding but that of FP32 sums, whatever the dtypes.

    An FP32 weight is the sum of three BF16 terms, which BF16 values meet on tensor cores exactly.
    """
    if weight.dtype == x.dtype:
        return tl.dot(x, weight, total, input_precision="ieee")
    for _ in tl.static_range(3):
        term = weight.to(x.dtype)
        total = tl.dot(x, term, total)
        weight -= term.to(tl.float32)
    return total


@triton.jit
def _split_sum(
    total,
    x_rows,
    weight_rows,
    in_tokens,
    in_rows,
    WIDTH: tl.constexpr,
    MODEL: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add one input's part to the sums of the quarters of its columns, (4, tokens, rows)."""
    QUARTER: tl.constexpr = (WIDTH + 3) // 4
    first = (tl.arange(0, 4) * QUARTER)[:, None, None]
    for start in tl.range(0, QUARTER, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)[None, None]
        in_x, in_weight = in_tokens[None, :, None], in_rows[None, :, None]
        if QUARTER % BLOCK != 0 or WIDTH % 4 != 0:
            exists = (column < QUARTER) & (first + column < WIDTH)
            in_x, in_weight = in_x & exists, in_weight & exists
        x = tl.load(x_rows[None, :, None] + first + column, mask=in_x, other=0.0)
        weight = tl.load(weight_rows[None, :, None] + first + column, mask=in_weight, other=0.0)
        total = _dot(x.to(MODEL), tl.permute(weight, (0, 2, 1)), total)
    return total


@triton.jit
def _split_rows(
    program,
    x_ptrs,  # of each input, (T, its width); the inputs stand beside each other
    weight_ptr,  # (N, at least the sum of the widths)
    weight_stride,
    bias_ptr,  # (N,), or None
    y_ptr,  # (T, N)
    tokens,
    N: tl.constexpr,
    WIDTHS: tl.constexpr,
    MODEL: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    TANH: tl.constexpr,
):
    """Compute a few rows of `[x...] Wᵀ + b`, or of its tanh, a quarter of the columns to each warp.

    Inputs are rounded to the model dtype, `MODEL`, where they are wider.
    """
    rows, token = program * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    in_rows, in_tokens = rows < N, token < tokens
    weight_rows = weight_ptr + rows.to(tl.int64) * weight_stride
    total = tl.zeros([4, TOKENS, ROWS], tl.float32)
    for s in tl.static_range(len(x_ptrs)):
        x_rows = x_ptrs[s] + token * WIDTHS[s]
        total = _split_sum(
            total, x_rows, weight_rows, in_tokens, in_rows, WIDTHS[s], MODEL, BLOCK, STAGES
        )
        weight_rows += WIDTHS[s]
    y = tl.sum(total, axis=0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=in_rows, other=0.0).to(tl.float32)[None]
    if TANH:
        y = _tanh(y)
    mask = in_tokens[:, None] & in_rows[None]
    tl.store(y_ptr + token[:, None] * N + rows[None], y, mask=mask)


@triton.jit
def _products(
    x_ptr,
    weight_ptr,
    y_ptr,
    other_x_ptrs,
    other_weight_ptr,
    other_weight_stride,
    other_bias_ptr,
    other_y_ptr,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    OTHER_N: tl.constexpr,
    OTHER_WIDTHS: tl.constexpr,
    OTHER_TANH: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OTHER_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`x Wᵀ`, and beside it another product, whose programs come first: they are the longer ones."""
    program = tl.program_id(0)
    MODEL: tl.constexpr = weight_ptr.dtype.element_ty
    OTHERS: tl.constexpr = (OTHER_N + OTHER_ROWS - 1) // OTHER_ROWS
    if OTHERS > 0:
        if program < OTHERS:
            if TOKENS == 1:
                _row(
                    program,
                    other_x_ptrs,
                    other_weight_ptr,
                    other_weight_stride,
                    other_bias_ptr,
                    other_y_ptr,
                    OTHER_WIDTHS,
                    MODEL,
                    BLOCK,
                    OTHER_TANH,
                )
            else:
                _split_rows(
                    program,
                    other_x_ptrs,
                    other_weight_ptr,
                    other_weight_stride,
                    other_bias_ptr,
                    other_y_ptr,
                    tokens,
                    OTHER_N,
                    OTHER_WIDTHS,
                    MODEL,
                    TOKENS,
                    OTHER_ROWS,
                    BLOCK,
                    STAGES,
                    OTHER_TANH,
                )
            return
    program -= OTHERS
    if TOKENS == 1:
        _row(program, (x_ptr,), weight_ptr, K, None, y_ptr, (K,), MODEL, BLOCK, False)
    elif WIDE:
        _wide_rows(program, x_ptr, weight_ptr, y_ptr, tokens, N, K, TOKENS, ROWS, BLOCK, STAGES)
    else:
        _split_rows(
            program,
            (x_ptr,),
            weight_ptr,
            K,
            None,
            y_ptr,
            tokens,
            N,
            (K,),
            MODEL,
            TOKENS,
            ROWS,
            BLOCK,
            STAGES,
            False,
        )


@triton.jit
def _gated_rows(
    latent_ptr, gate_ptr, y_ptr, rows, I: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute some rows of one expert's SiLU(gate z)·(up z) for one token."""
    in_rows = rows < I
    gate_ptrs = gate_ptr + rows[:, None] * WIDTH
    up_ptrs = gate_ptrs + I * WIDTH
    gates, ups = (), ()
    for c in tl.static_range((WIDTH + BLOCK - 1) // BLOCK):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        gates = gates + (_tile(gate_ptrs, columns, WIDTH, in_rows, BLOCK),)
        ups = ups + (_tile(up_ptrs, columns, WIDTH, in_rows, BLOCK),)
    gate_products = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    up_products = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    for c in tl.static_range((WIDTH + BLOCK - 1) // BLOCK):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        z = _vector(latent_ptr, columns, WIDTH, BLOCK).to(tl.float32)[None]
        gate_products += gates[c].to(tl.float32) * z
        up_products += ups[c].to(tl.float32) * z
    gate, up = tl.sum(gate_products, axis=1), tl.sum(up_products, axis=1)
    tl.store(y_ptr + rows, gate * tl.sigmoid(gate) * up, mask=in_rows)


@triton.jit
def _experts_in(
    latent_ptr,  # (T, H)
    routing_ptr,  # (T, 2K): weights, then experts
    gate_up_ptr,  # (E, 2I, H)
    shared_gate_up_ptr,  # (2J, H), or None
    y_ptr,  # (T, K, I)
    shared_y_ptr,  # (T, J)
    H: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    latent_ptr += token * H
    if slot < TOP_K:
        expert = tl.load(routing_ptr + token * 2 * TOP_K + TOP_K + slot).to(tl.int64)
        gate_ptr = gate_up_ptr + expert * (2 * I * H)
        _gated_rows(latent_ptr, gate_ptr, y_ptr + (token * TOP_K + slot) * I, rows, I, H, BLOCK)
    elif J > 0:
        _gated_rows(latent_ptr, shared_gate_up_ptr, shared_y_ptr + token * J, rows, J, H, BLOCK)


@triton.jit
def _experts_out(
    y_ptr,  # (T, K, I)
    shared_y_ptr,  # (T, J)
    routing_ptr,  # (T, 2K): weights, then experts
    down_ptr,  # (E, H, I)
    shared_down_ptr,  # (H, J), or None
    out_ptr,  # (T, H)
    H: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < H
    tiles = ()
    for k in tl.static_range(TOP_K):
        expert = tl.load(routing_ptr + token * 2 * TOP_K + TOP_K + k).to(tl.int64)
        row_ptrs = down_ptr + expert * (H * I) + rows[:, None] * I
        of_expert = ()
        for c in tl.static_range((I + BLOCK - 1) // BLOCK):
            columns = c * BLOCK + tl.arange(0, BLOCK)
            of_expert = of_expert + (_tile(row_ptrs, columns, I, in_rows, BLOCK),)
        tiles = tiles + (of_expert,)
    shared_tiles = ()
    if J > 0:
        row_ptrs = shared_down_ptr + rows[:, None] * J
        for c in tl.static_range((J + BLOCK - 1) // BLOCK):
            columns = c * BLOCK + tl.arange(0, BLOCK)
            shared_tiles = shared_tiles + (_tile(row_ptrs, columns, J, in_rows, BLOCK),)

    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(routing_ptr + token * 2 * TOP_K + k)
        expert_y_ptr = y_ptr + (token * TOP_K + k) * I
        for c in tl.static_range((I + BLOCK - 1) // BLOCK):
            columns = c * BLOCK + tl.arange(0, BLOCK)
            y = _vector(expert_y_ptr, columns, I, BLOCK).to(tl.float32)
            products += tiles[k][c].to(tl.float32) * (weight * y)[None]
    for c in tl.static_range((J + BLOCK - 1) // BLOCK):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        y = _vector(shared_y_ptr + token * J, columns, J, BLOCK).to(tl.float32)
        products += shared_tiles[c].to(tl.float32) * y[None]
    tl.store(out_ptr + token * H + rows, tl.sum(products, axis=1), mask=in_rows)


class Beside(NamedTuple):
    """`[inputs...] weightᵀ + bias`, or its tanh: a small product in the launch of another one.

    Attributes:
        inputs: each (T, its width), contiguous.
        weight: (N, at least the sum of the widths), rows contiguous; columns beyond are left out.
        bias: (N,).
        tanh: whether the tanh is taken.
    """

    inputs: Sequence[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor
    tanh: bool = False


class Card(NamedTuple):
    """What tiles follow from: multiprocessors, and bytes of shared memory that a program may have."""

    processors: int
    shared_bytes: int


@functools.cache
def card() -> Card:
    """Return this process's card; in Triton's interpreter, one of a middling size."""
    if not torch.cuda.is_available():
        return Card(processors=64, shared_bytes=101376)
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Card(seen.multi_processor_count, seen.shared_memory_per_block_optin)


_WIDE_ROWS = 32
"""Rows of a program where these leave one for each multiprocessor, and a few."""

_SPLIT_ROWS = 8
"""Rows of a program elsewhere: the fewest that tensor cores take."""

_EXPERT_ROWS = 2
"""Rows of an expert's weight in a program, of one warp, for any number of tokens."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x weightᵀ`, (T, N); `x` is (T, K), `weight` (N, K), both contiguous, model dtype."""
    return _launch(x, weight, None)[0]


def products(
    x: torch.Tensor, weight: torch.Tensor, other: Beside
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x weightᵀ` and another product, each (T, N) in its weight's dtype, of one launch."""
    y, other_y = _launch(x, weight, other)
    assert other_y is not None
    return y, other_y


def _launch(
    x: torch.Tensor, weight: torch.Tensor, other: Beside | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    (tokens, width), count = x.shape, weight.shape[0]
    y, other_y = x.new_empty((tokens, count)), None
    other_count, other_widths = 0, ()
    beside: tuple[Any, ...] = ((), None, 0, None, None)
    if other is not None:
        other_count, other_widths = len(other.weight), tuple(one.shape[1] for one in other.inputs)
        other_y = other.weight.new_empty((tokens, other_count))
        beside = tuple(other.inputs), other.weight, other.weight.stride(0), other.bias, other_y
    if tokens == 1:
        padded, wide, rows, other_rows, block, stages = 1, False, 1, 1, 512, 1
    else:
        padded = max(triton.next_power_of_2(tokens), 16)
        wide = count >= 1.2 * _WIDE_ROWS * card().processors
        rows, other_rows, block = _WIDE_ROWS if wide else _SPLIT_ROWS, _SPLIT_ROWS, 128
        loaded = [(rows * weight.itemsize + padded * x.itemsize) * block * (1 if wide else 4)]
        if other is not None:
            loaded += [(other_rows * other.weight.itemsize + padded * x.itemsize) * block * 4]
        # Two programs share a multiprocessor's memory.
        stages = min(max(card().shared_bytes // 2 // max(loaded), 1), 4)
    _products[(triton.cdiv(count, rows) + triton.cdiv(other_count, other_rows),)](
        x,
        weight,
        y,
        *beside,
        tokens,
        N=count,
        K=width,
        OTHER_N=other_count,
        OTHER_WIDTHS=other_widths,
        OTHER_TANH=other is not None and other.tanh,
        TOKENS=padded,
        WIDE=wide,
        ROWS=rows,
        OTHER_ROWS=other_rows,
        BLOCK=block,
        STAGES=stages,
        num_warps=4,
    )
    return y, other_y


def experts(
    latent: torch.Tensor,
    routing: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
) -> torch.Tensor:
    """See `few_tokens.experts`."""
    return experts_out(
        *experts_in(latent, routing, gate_up, shared_gate_up), routing, down, shared_down
    )


def experts_in(
    latent: torch.Tensor,
    routing: torch.Tensor,
    gate_up: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SiLU(gate z)·(up z) of the chosen experts, (T, K, I), and the shared one, (T, J)."""
    tokens, width = latent.shape
    top_k, inner = routing.shape[1] // 2, gate_up.shape[1] // 2
    shared = 0 if shared_gate_up is None else shared_gate_up.shape[0] // 2
    y, shared_y = latent.new_empty((tokens, top_k, inner)), latent.new_empty((tokens, shared))
    _experts_in[(tokens, top_k + (shared > 0), triton.cdiv(max(inner, shared), _EXPERT_ROWS))](
        latent,
        routing,
        gate_up,
        shared_gate_up,
        y,
        shared_y,
        H=width,
        I=inner,
        J=shared,
        TOP_K=top_k,
        ROWS=_EXPERT_ROWS,
        BLOCK=1024,
        num_warps=1,
    )
    return y, shared_y


def experts_out(
    y: torch.Tensor,
    shared_y: torch.Tensor,
    routing: torch.Tensor,
    down: torch.Tensor,
    shared_down: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sum of the chosen experts' outputs, weighted, and the shared one's, (T, H)."""
    tokens, top_k, inner = y.shape
    width = down.shape[1]
    out = y.new_empty((tokens, width))
    _experts_out[(tokens, triton.cdiv(width, _EXPERT_ROWS))](
        y,
        shared_y,
        routing,
        down,
        shared_down,
        out,
        H=width,
        I=inner,
        J=shared_y.shape[1],
        TOP_K=top_k,
        ROWS=_EXPERT_ROWS,
        BLOCK=256,
        num_warps=1,
    )
    return out
