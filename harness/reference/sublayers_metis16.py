# SPDX-License-Identifier: Apache-2.0
"""The reference's sublayers: attention, Mamba-2 and the latent mixture of experts.

The mixers alone keep state between steps: `state` is what one (pass, layer) keeps, empty before the
first token, then filled and replaced by the mixer. Letters and the rules of precision are in the
reference's docstring. Checkpoints carry this file unchanged, as part of their remote code.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_metis16 import Metis16Config


def fp8_round(x: Tensor, per_tensor: bool = False, headroom: Tensor | float = 1.0) -> Tensor:
    """Return x in FP32 after a round trip through FP8 E4M3.

    Args:
        per_tensor: one scale (amax / 448) for all of x, not one per row.
        headroom: 1 and more, (..., 1): times the scale that x itself needs.
    """
    x = x.float()
    amax = x.abs().amax(() if per_tensor else -1, keepdim=True).clamp(min=1e-12)
    scale = amax * headroom / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class QuantizableLinear(nn.Linear):
    """A linear that FP8 quantizes: weights per output channel or as a whole, activations per token."""

    headroom: Tensor | float = 1.0  # of the activations' scales
    rounded_weight: Tensor | None = None  # (out, in), FP32

    def simulate_fp8(self, scale: Literal["channel", "tensor"] | None) -> None:
        """Compute from now on what FP8 weights with one scale a channel, or for all, compute."""
        self.rounded_weight = None
        if scale is not None:
            self.rounded_weight = fp8_round(self.weight.detach(), per_tensor=scale == "tensor")

    def forward(self, x: Tensor) -> Tensor:
        if self.rounded_weight is None:
            return super().forward(x)
        return F.linear(fp8_round(x, headroom=self.headroom), self.rounded_weight).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, block: int = 512) -> Tensor:
    """Return softmax(q k' / sqrt(head_dim)) v, (B, H, T, head_dim), a block of queries at a time.

    Args:
        q: (B, H, T, head_dim), the last T positions. k, v: (B, K, seen, head_dim), all positions.
        block: queries that one step takes; any value gives the same y but for rounding. A mask, and
            where PyTorch takes its plain path the scores, are block x seen: T x seen would not fit.
    """
    earlier = k.shape[2] - q.shape[2]
    ys = []
    for start in range(0, q.shape[2], block):
        queries = q[:, :, start : start + block]
        first = earlier + start  # position of the first query of the block
        seen = first + queries.shape[2]
        causal = torch.ones(queries.shape[2], seen, dtype=torch.bool, device=q.device).tril(first)
        keys, values = k[:, :, :seen], v[:, :, :seen]
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=causal, enable_gqa=True)
        ys.append(y)
    return torch.cat(ys, dim=2)


class Attention(nn.Module):
    """Causal grouped-query attention without positions, with a low-rank QKV correction per pass."""

    def __init__(self, config: Metis16Config):
        super().__init__()
        D, rank = config.hidden_size, config.attention_pass_lora_rank
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.heads = [H, K, K]
        self.head_dim = config.head_dim
        self.qkv = QuantizableLinear(D, sum(self.heads) * self.head_dim, bias=False)
        self.out = QuantizableLinear(H * self.head_dim, D, bias=False)
        self.pass_lora_down = nn.Linear(D, rank, bias=False)
        self.pass_lora_up = nn.Linear(rank, sum(self.heads) * self.head_dim, bias=False)
        self.pass_gates = nn.Parameter(torch.zeros(config.max_passes))

    def forward(self, u: Tensor, p: int, state: dict[str, Tensor]) -> Tensor:
        gate = self.pass_gates[p].float().tanh().to(u.dtype)
        qkv = self.qkv(u) + gate * self.pass_lora_up(self.pass_lora_down(u))
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.heads, dim=1)
        if "k" in state:
            k, v = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)
        state["k"], state["v"] = k, v
        y = causal_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2))


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of s = exp(dt A) s + dt x B', y = s C, a chunk at a time.

    Args:
        x: (B, T, heads, head_dim). dt: (B, T, heads). A: (heads,), negative.
        B, C: (B, T, heads, N), the group's row repeated for its heads.
        state: (B, heads, head_dim, N). All FP32.
        chunk: tokens that one step takes; any value gives the same y but for rounding.
    """
    ys = []
    for xc, dtc, Bc, Cc in zip(*(t.split(chunk, dim=1) for t in (x, dt, B, C)), strict=True):
        log_decay = (
            (dtc * A).cumsum(1).transpose(1, 2)
        )  # since the chunk's start, (B, heads, chunk)
        later = torch.ones(log_decay.shape[-1:] * 2, dtype=torch.bool, device=x.device).triu(1)
        between = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
        between = between.masked_fill(later, -math.inf).exp()
        xdt = xc * dtc.unsqueeze(-1)
        y = torch.einsum("bihn,bjhn,bhij,bjhp->bihp", Cc, Bc, between, xdt)
        ys.append(y + torch.einsum("bihn,bhpn,bhi->bihp", Cc, state, log_decay.exp()))
        state = log_decay[..., -1:, None].exp() * state
        state = state + torch.einsum("bjhn,bhj,bjhp->bhpn", Bc, between[..., -1, :], xdt)
    return torch.cat(ys, dim=1), state


class GatedGroupNorm(nn.Module):
    """RMS norm of y * SiLU(z) over each of the Mamba groups: the gate first, the norm after."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        g = (y.float() * F.silu(z.float())).unflatten(-1, (self.groups, -1))
        g = g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + self.eps)
        return (g.flatten(-2) * self.weight.float()).to(self.weight.dtype)


class Mamba2(nn.Module):
    def __init__(self, config: Metis16Config):
        super().__init__()
        D, heads = config.hidden_size, config.mamba_heads
        self.d_inner, self.conv_dim = config.d_inner, config.conv_dim
        self.heads, self.head_dim = heads, config.mamba_head_dim
        self.groups, self.state_size = config.mamba_ngroups, config.mamba_d_state
        self.taps, self.chunk = config.mamba_d_conv, config.mamba_chunk_size
        self.in_proj = QuantizableLinear(D, self.d_inner + self.conv_dim + heads, bias=False)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, self.taps, groups=self.conv_dim)
        self.dt_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.norm = GatedGroupNorm(self.d_inner, self.groups, config.mamba_norm_eps)
        self.out_proj = nn.Linear(self.d_inner, D, bias=False)

    def forward(self, u: Tensor, p: int, state: dict[str, Tensor]) -> Tensor:
        z, xbc, dt = self.in_proj(u).split([self.d_inner, self.conv_dim, self.heads], dim=-1)
        if not state:
            ssm_shape = u.shape[0], self.heads, self.head_dim, self.state_size
            state["ssm"] = torch.zeros(ssm_shape, dtype=torch.float32, device=u.device)
            state["conv"] = xbc.new_zeros(u.shape[0], self.taps - 1, self.conv_dim)
        xbc = torch.cat([state["conv"], xbc], dim=1)
        state["conv"] = xbc[:, 1 - self.taps :]
        xbc = F.silu(self.conv1d(xbc.transpose(1, 2))).transpose(1, 2).float()
        x, B, C = xbc.split([self.d_inner, *[self.groups * self.state_size] * 2], dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        B, C = self._per_head(B), self._per_head(C)
        dt = F.softplus(dt.float() + self.dt_bias)
        A = -self.A_log.exp()
        y, state["ssm"] = ssd_scan(x, dt, A, B, C, state["ssm"], self.chunk)
        y = y + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(-2).to(u.dtype), z))

    def _per_head(self, rows: Tensor) -> Tensor:
        rows = rows.unflatten(-1, (self.groups, self.state_size))
        return rows.repeat_interleave(self.heads // self.groups, dim=2)


class SwiGLU(nn.Module):
    def __init__(self, size: int, width: int, linear: type[nn.Linear]):
        super().__init__()
        self.gate_up = linear(size, 2 * width, bias=False)
        self.down = linear(width, size, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        gate, up = self.gate_up(z).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LatentMoE(nn.Module):
    def __init__(self, config: Metis16Config):
        super().__init__()
        D, R, latent = config.hidden_size, config.route_feature_dim, config.latent_dim
        E, width = config.n_routed_experts, config.expert_intermediate_dim
        self.top_k = config.num_experts_per_tok
        self.latent_down = nn.Linear(D, latent, bias=False)
        self.latent_up = nn.Linear(latent, D, bias=False)
        self.expert_embeddings = nn.Parameter(torch.zeros(E, R))
        self.expert_router = nn.Linear(latent + R, E, dtype=torch.float32)
        self.selection_bias = nn.Parameter(torch.zeros(E, dtype=torch.float32))
        self.shared_expert = SwiGLU(latent, width, nn.Linear)
        experts = [SwiGLU(latent, width, QuantizableLinear) for _ in range(E)]
        self.local_experts = nn.ModuleList(experts)

    def forward(self, u: Tensor, route_features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return o (B, T, D); in FP32, coalition (B, T, R) and [entropy; confidence] (B, T, 2)."""
        z = self.latent_down(u).flatten(0, 1)
        logits = self.expert_router(torch.cat([z, route_features.flatten(0, 1)], dim=-1).float())
        chosen = (logits + self.selection_bias).topk(self.top_k, dim=-1).indices
        weights = logits.gather(-1, chosen).softmax(-1)

        routed = torch.zeros_like(z, dtype=torch.float32)
        for e in chosen.unique().tolist():
            token, slot = (chosen == e).nonzero(as_tuple=True)
            expert_output = self.local_experts[e](z[token]).float()
            routed = routed.index_add(0, token, weights[token, slot, None] * expert_output)
        o = self.latent_up(routed.to(z.dtype) + self.shared_expert(z))

        coalition = torch.einsum("tk,tkr->tr", weights, self.expert_embeddings[chosen].float())
        probabilities = logits.softmax(-1)
        entropy = -(probabilities * probabilities.clamp(min=1e-9).log()).sum(-1)
        entropy = entropy / math.log(logits.shape[-1])
        certainty = torch.stack([entropy, probabilities.amax(-1)], dim=-1)
        return o.view_as(u), *(t.unflatten(0, u.shape[:2]) for t in (coalition, certainty))
