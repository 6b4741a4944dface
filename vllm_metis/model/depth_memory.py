# SPDX-License-Identifier: Apache-2.0
"""The depth memory: what a token remembers of its own earlier layers, within one forward pass.

Attention layers and the end of each pass write an entry to the token's bank; every layer
and the end of each pass read all entries with one query per residual stream. Nothing
outlives the step, so no cache is involved. One head, whatever `memory_heads` says.

An entry is written once and read by every later layer, so the products that a read would need
are done when it is written, and a read has no matrix left:

    (W_q S + b_q) · k = S · (W_q^T k) + b_q · k        and        W_o Σ w v + b_o = Σ w (W_o v + b_o)

Source: docs/model.md, forward pass 2.1, 2.2, 2.10 and 3.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.utils import set_weight_attrs

from vllm_metis.config import Metis16Config
from vllm_metis.model.few_tokens import FeatureInputs
from vllm_metis.model.router import Routing
from vllm_metis.model.stream_ops import (
    Entry,
    Gates,
    MemoryRead,
    Reading,
    Unwritten,
    read_memory,
)

Bank = list[Entry]
"""The entries written so far."""


class DepthMemory(nn.Module):
    """Bank reads and writes and the route features; one set of weights for every layer.

    Buffers, filled by `finalize`: `entry_bias` (P, A + 1, M), float32; of the map from an entry to
    its key and value, `fold_weight` (2D, M) and `fold_bias` (2D,), model dtype; of that to the
    bias of its logit, `logit_weight` (M,) and `logit_bias` (), float32.
    """

    entry_bias: torch.Tensor
    fold_weight: torch.Tensor
    fold_bias: torch.Tensor
    logit_weight: torch.Tensor
    logit_bias: torch.Tensor

    def __init__(self, config: Metis16Config, prefix: str) -> None:
        super().__init__()
        hidden, width, features = config.hidden_size, config.memory_dim, config.route_feature_dim
        self.hidden_size, self.route_feature_dim = hidden, features
        self.routed_share = config.num_experts_per_tok / config.max_routed_k
        self.scale = width**-0.5

        def linear(name: str, inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, return_bias=False, prefix=f"{prefix}.{name}")

        # Held for `finalize` alone: no product is run with these four.
        self.query = nn.Linear(hidden, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, hidden)
        for folded in (self.query, self.key, self.value, self.output):
            folded.requires_grad_(False)
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
        for name, shape, dtype in (
            ("entry_bias", (config.num_passes, config.num_anchors, width), torch.float32),
            ("fold_weight", (2 * hidden, width), None),
            ("fold_bias", (2 * hidden,), None),
            ("logit_weight", (width,), torch.float32),
            ("logit_bias", (), torch.float32),
        ):
            buffer = torch.full(shape, float("nan"), dtype=dtype)
            self.register_buffer(name, buffer, persistent=False)

    def _load_route_weight(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        # Named as vLLM's own loaders name it: a reload hands the new parameter over by that name.
        hidden, features = self.hidden_size, self.route_feature_dim
        kept, difference, history = loaded.split([2 * hidden, hidden, features], dim=1)
        param.data.copy_(torch.cat([kept, history, difference], dim=1))

    def finalize(self) -> None:
        """Compute the entry bias of each (pass, anchor) and the folded products from the weights."""
        self.entry_bias.copy_(
            self.pass_embeddings.float()[:, None] + self.anchor_embeddings.float()[None]
        )
        # In float64: these are sums over M that a read would have rounded once, not twice.
        query, key, value, output = (
            (linear.weight.double(), linear.bias.double())
            for linear in (self.query, self.key, self.value, self.output)
        )
        self.fold_weight.copy_(torch.cat([query[0].T @ key[0], output[0] @ value[0]]))
        self.fold_bias.copy_(torch.cat([query[0].T @ key[1], output[0] @ value[1] + output[1]]))
        self.logit_weight.copy_(query[1] @ key[0])
        self.logit_bias.copy_(query[1] @ key[1])

    def read(self, unwritten: Unwritten, bank: Bank, reading: Reading) -> MemoryRead:
        """Write a sublayer's output back, read every entry of `bank` into the streams, and read these."""
        gates = Gates(self.scale, self.stream_gate, self.stream_gate_bias)
        return read_memory(unwritten, bank, gates, reading)

    def feature_inputs(self, read: MemoryRead, history: torch.Tensor) -> FeatureInputs:
        """Return what the router's features inside a layer are made of; `history` is (T, R), float32."""
        return FeatureInputs(read.mean, read.summary, history, self.route_weight, self.route_bias)

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
        key_value = nn.functional.linear(entry, self.fold_weight, self.fold_bias)
        bias = (entry.float() * self.logit_weight).sum(-1) + self.logit_bias
        bank.append(Entry(key_value, bias))


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
