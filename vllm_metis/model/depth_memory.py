# SPDX-License-Identifier: Apache-2.0
"""The depth memory: what a token remembers of its own earlier layers, within one forward pass.

Attention layers and the end of each pass write an entry to the token's bank; every layer
and the end of each pass read all entries with one query per residual stream. Nothing
outlives the step, so no cache is involved. One head, whatever `memory_heads` says.

Source: docs/model.md, forward pass 2.1, 2.2, 2.10 and 3.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.utils import set_weight_attrs

from vllm_metis.config import Metis16Config
from vllm_metis.model.moe import Routing

Bank = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of the entries written so far, each (T, M), model dtype."""


class MemoryRead(NamedTuple):
    """What a read returns.

    Attributes:
        streams: (T, S, D), model dtype, with the gated read added.
        summary: (T, D), model dtype, mean of the ungated reads; zeros for an empty bank.
    """

    streams: torch.Tensor
    summary: torch.Tensor


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of each stream's query over the token's own entries, softmax in FP32.

    Args:
        query: (T, S, M), model dtype.
        keys, values: (T, N, M), model dtype.

    Returns:
        (T, S, M), model dtype.
    """
    scale = 1.0 / math.sqrt(query.shape[-1])
    # Elementwise rather than batched products: T tiny matrices each, and exact FP32.
    logits = (query.float()[:, :, None] * keys.float()[:, None]).sum(-1) * scale
    weights = logits.softmax(-1)
    return (weights[..., None] * values.float()[:, None]).sum(2).to(query.dtype)


def add_gated(
    streams: torch.Tensor, read: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return `S_i + sigmoid(<S_i, gate_i> / sqrt(D) + bias_i) · y_i`, gates in FP32.

    Args:
        streams, read: (T, S, D), model dtype.
        gate: (S, D); bias: (S,).

    Returns:
        (T, S, D), model dtype, rounded once.
    """
    wide = streams.float()
    logits = (wide * gate.float()).sum(-1) / math.sqrt(streams.shape[-1]) + bias.float()
    return (wide + logits.sigmoid()[..., None] * read.float()).to(streams.dtype)


def stream_mean(streams: torch.Tensor) -> torch.Tensor:
    """Return the mean of the streams, (T, D), model dtype, summed in FP32."""
    return streams.float().mean(1).to(streams.dtype)


class DepthMemory(nn.Module):
    """Bank reads and writes and the route features; one set of weights for every layer.

    Buffer, float32, filled by `finalize`: `entry_bias` (P, A + 1, M).
    """

    entry_bias: torch.Tensor

    def __init__(self, config: Metis16Config, prefix: str) -> None:
        super().__init__()
        hidden, width, features = config.hidden_size, config.memory_dim, config.route_feature_dim
        self.hidden_size, self.route_feature_dim = hidden, features
        self.routed_share = config.num_experts_per_tok / config.max_routed_k

        def linear(name: str, inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, return_bias=False, prefix=f"{prefix}.{name}")

        self.query = linear("query", hidden, width)
        self.key = linear("key", width, width)
        self.value = linear("value", width, width)
        self.output = linear("output", width, hidden)
        self.state_write = linear("state_write", hidden, width)
        self.metadata_write = linear("metadata_write", features + 4, width)
        self.stream_gate = nn.Parameter(torch.empty(config.num_streams, hidden))
        self.stream_gate_bias = nn.Parameter(torch.empty(config.num_streams))
        self.pass_embeddings = nn.Parameter(torch.empty(config.num_passes, width))
        self.anchor_embeddings = nn.Parameter(torch.empty(config.num_anchors, width))
        # Columns [mean, summary, history, difference]: inside layers the difference is
        # exactly zero, so they use the columns before it and save the product with it.
        self.route_weight = nn.Parameter(torch.empty(features, 3 * hidden + features))
        set_weight_attrs(self.route_weight, {"weight_loader": self._load_route_weight})
        self.route_bias = nn.Parameter(torch.empty(features))
        entry_bias = torch.full(
            (config.num_passes, config.num_anchors, width), float("nan"), dtype=torch.float32
        )
        self.register_buffer("entry_bias", entry_bias, persistent=False)

    def _load_route_weight(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        # Named as vLLM's own loaders name it: a reload hands the new parameter over by that name.
        hidden, features = self.hidden_size, self.route_feature_dim
        kept, difference, history = loaded.split([2 * hidden, hidden, features], dim=1)
        param.data.copy_(torch.cat([kept, history, difference], dim=1))

    def finalize(self) -> None:
        """Compute the entry bias of each (pass, anchor) from the loaded weights."""
        self.entry_bias.copy_(
            self.pass_embeddings.float()[:, None] + self.anchor_embeddings.float()[None]
        )

    def read(self, streams: torch.Tensor, bank: Bank) -> MemoryRead:
        """Read every entry of `bank` into `streams` (T, S, D)."""
        if not bank:
            return MemoryRead(streams, torch.zeros_like(streams[:, 0]))
        keys = torch.stack([key for key, _ in bank], dim=1)
        values = torch.stack([value for _, value in bank], dim=1)
        y = self.output(attend(self.query(streams), keys, values))
        return MemoryRead(
            add_gated(streams, y, self.stream_gate, self.stream_gate_bias), stream_mean(y)
        )

    def route_features(
        self, mean: torch.Tensor, summary: torch.Tensor, history: torch.Tensor
    ) -> torch.Tensor:
        """Return the router's features inside a layer, (T, R), model dtype.

        Args:
            mean, summary: (T, D), model dtype.
            history: (T, R), float32.
        """
        inputs = torch.cat([mean, summary, history.to(mean.dtype)], dim=-1)
        weight = self.route_weight[:, : inputs.shape[-1]]
        return nn.functional.linear(inputs, weight, self.route_bias).tanh()

    def pass_features(
        self,
        mean: torch.Tensor,
        summary: torch.Tensor,
        difference: torch.Tensor,
        history: torch.Tensor,
    ) -> torch.Tensor:
        """Return the features at the end of a pass, (T, R), model dtype.

        Args:
            mean, summary, difference: (T, D), model dtype; the difference is against the
                mean at the end of the pass before.
            history: (T, R), float32.
        """
        inputs = torch.cat([mean, summary, history.to(mean.dtype), difference], dim=-1)
        return nn.functional.linear(inputs, self.route_weight, self.route_bias).tanh()

    def write(
        self,
        bank: Bank,
        mean: torch.Tensor,
        routing: Routing,
        continuation: torch.Tensor,
        pass_index: int,
        anchor: int,
    ) -> None:
        """Append the entry of one anchor to `bank`.

        Args:
            mean: (T, D), model dtype, of the streams after the layer.
            routing: What the layer's router decided.
            continuation: (T, 1), float32, of the pass before (zero in the first).
            anchor: Number of the attention layer, or their count at the end of a pass.
        """
        share = torch.full_like(continuation, self.routed_share)
        metadata = torch.cat(
            [routing.coalition, share, routing.entropy, routing.confidence, continuation], dim=-1
        )
        entry = self.state_write(mean) + self.metadata_write(metadata.to(mean.dtype))
        entry = entry + self.entry_bias[pass_index, anchor].to(entry.dtype)
        bank.append((self.key(entry), self.value(entry)))


class Continuation(nn.Module):
    """Probability of a further pass, at the end of a pass that is not the last; FP32 throughout.

    Metis-1.6 always runs all passes: the probability is only written to the depth memory.
    """

    def __init__(self, config: Metis16Config, prefix: str) -> None:
        super().__init__()
        features = config.route_feature_dim
        self.limit = config.continuation_logit_limit
        self.hidden = ReplicatedLinear(
            3 * config.hidden_size + features,
            features,
            params_dtype=torch.float32,
            return_bias=False,
            prefix=f"{prefix}.hidden",
        )
        self.output = ReplicatedLinear(
            features, 1, params_dtype=torch.float32, return_bias=False, prefix=f"{prefix}.output"
        )

    def forward(
        self,
        mean: torch.Tensor,
        summary: torch.Tensor,
        difference: torch.Tensor,
        features: torch.Tensor,
    ) -> torch.Tensor:
        """Return the probability, (T, 1), float32.

        Args:
            mean, summary, difference: (T, D), model dtype.
            features: (T, R), model dtype, from `DepthMemory.pass_features`.
        """
        mean, difference = mean.float(), difference.float()
        inputs = torch.cat([mean, summary.float(), difference, features.float()], dim=-1)
        logit = self.output(nn.functional.silu(self.hidden(inputs)))
        change = root_mean_square(difference) / root_mean_square(mean).clamp(min=1e-6)
        return (logit + change.tanh() - 0.5).clamp(-self.limit, self.limit).sigmoid()


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square over the last dimension, kept, without an epsilon."""
    return x.square().mean(-1, keepdim=True).sqrt()
