# SPDX-License-Identifier: Apache-2.0
"""The reference: Metis-1.6 in plain PyTorch on Transformers' base classes.

The model written down as simply as it can be run, to judge faster implementations by. It shares no
code with them, imports torch and transformers alone, and is also the remote code of the checkpoints
that this package writes. Source of truth: the model's public training runtime, through the vectors
in tests/golden that it computed.

Letters: B sequences, T tokens, S=4 residual streams, D hidden, H/K query/KV heads, G Mamba groups,
N state, E experts, R route features, M depth memory, P passes, L layers.

The forward pass, per token except in the mixers::

    S_i = embedding[token] + stream_embeddings[i];  history = 0;  bank = [];  cont = 0
    for p in 0..P-1:
        for l in 0..L-1:
            S, summary = memory read (S, bank)
            rf = tanh(route_projection [mean S; summary; 0; history])
            mixed, u, w = mixer_connection (S, p);   S = mixed + w * mixer(u, p)
            mixed, u, w = moe_connection (S, p);     S = mixed + w * moe(u, rf)
            history = history/2 + coalition/2
            attention layers: bank += memory write (mean S, metadata, p, anchor)
        S, summary = memory read (S, bank)           in the last pass too: it changes S
        cont = sigmoid(continuation(...));           bank += memory write (..., p, last anchor)
    logits = lm_head(final_norm(mean S))

Only the mixers keep state between steps: one convolution and SSM state or one KV cache per (pass,
layer), over weights that the passes share.

Precision: streams and projections are in the model dtype. FP32 always: the router and its biases,
A, D, dt and the scan, the Sinkhorn, every softmax and its logits, the memory's gates, the
continuation head, the gated group norm and the arithmetic of every norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_metis16 import Metis16Config
from .sublayers_metis16 import Attention, LatentMoE, Mamba2, QuantizableLinear

# Checkpoint tensors of the adaptive heads, which the released models do not use.
UNUSED_TENSORS = (r"depth_budget\.", r"\.k_router\.", r"\.k_budget\.")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * self.weight.float()).to(self.weight.dtype)


class HyperConnection(nn.Module):
    """Manifold-constrained hyper-connection: mixes the streams, reads u, says how to write back."""

    def __init__(self, config: Metis16Config):
        super().__init__()
        self.streams = streams = config.n_streams
        self.iterations = config.mhc_sinkhorn_iterations
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.read_logits = nn.Parameter(torch.zeros(streams))
        self.write_logits = nn.Parameter(torch.zeros(streams))
        self.mix_logits = nn.Parameter(torch.zeros(streams, streams))
        self.controller = nn.Linear(config.mhc_pass_embedding_dim, streams * (streams + 2))

    def coefficients(self, pass_embedding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Mx (S, S) doubly stochastic, r (S,), w (S,), all FP32."""
        controller = self.controller
        delta = F.linear(pass_embedding.float(), controller.weight.float(), controller.bias.float())
        mix, read, write = delta.split([self.streams**2, self.streams, self.streams])
        mx = self.mix_logits.float() + mix.view(self.streams, self.streams)
        for _ in range(self.iterations):
            mx = mx - mx.logsumexp(1, keepdim=True)
            mx = mx - mx.logsumexp(0, keepdim=True)
        r = (self.read_logits.float() + read).softmax(0)
        w = (self.write_logits.float() + write).softmax(0)
        return mx.exp(), r, w

    def forward(self, S: Tensor, pass_embedding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mixed (B, T, S, D), u (B, T, D) and w (S,)."""
        mx, r, w = self.coefficients(pass_embedding)
        mixed = torch.einsum("oi,btid->btod", mx, S.float()).to(S.dtype)
        u = self.norm(torch.einsum("i,btid->btd", r, S.float()))
        return mixed, u, w

    @staticmethod
    def write(mixed: Tensor, w: Tensor, o: Tensor) -> Tensor:
        return (mixed.float() + w[:, None] * o.float().unsqueeze(-2)).to(mixed.dtype)


class DepthMemory(nn.Module):
    """Memory over depth: the entries that earlier anchors wrote for the same token."""

    def __init__(self, config: Metis16Config):
        super().__init__()
        D, R, M = config.hidden_size, config.route_feature_dim, config.memory_dim
        self.memory_dim = M
        self.state_write = nn.Linear(D, M)
        self.metadata_write = nn.Linear(R + 4, M)
        self.query = nn.Linear(D, M)
        self.key = nn.Linear(M, M)
        self.value = nn.Linear(M, M)
        self.output = nn.Linear(M, D)
        self.route_projection = nn.Linear(3 * D + R, R)
        self.pass_embeddings = nn.Parameter(torch.zeros(config.max_passes, M))
        anchors = len(config.attention_layer_indices) + 1
        self.anchor_embeddings = nn.Parameter(torch.zeros(anchors, M))
        self.stream_gate = nn.Parameter(torch.zeros(config.n_streams, D))
        self.stream_gate_bias = nn.Parameter(torch.zeros(config.n_streams))

    def read(self, S: Tensor, bank: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return S (B, T, S, D) after the gated read, and the ungated summary (B, T, D)."""
        if not bank:
            return S, S.new_zeros(S.shape[:2] + S.shape[3:])
        entries = torch.stack(bank, dim=2)
        q, k, v = self.query(S), self.key(entries), self.value(entries)
        scores = torch.einsum("btsm,btem->btse", q.float(), k.float()) / math.sqrt(self.memory_dim)
        y = self.output(torch.einsum("btse,btem->btsm", scores.softmax(-1), v.float()).to(S.dtype))
        logits = (S.float() * self.stream_gate.float()).sum(-1) / math.sqrt(S.shape[-1])
        gate = (logits + self.stream_gate_bias.float()).sigmoid()
        return (S.float() + gate.unsqueeze(-1) * y.float()).to(S.dtype), y.mean(2)

    def route_features(
        self, mean: Tensor, summary: Tensor, difference: Tensor, history: Tensor
    ) -> Tensor:
        features = torch.cat([mean, summary, difference, history.to(mean.dtype)], dim=-1)
        return self.route_projection(features).tanh()

    def write(self, mean: Tensor, metadata: Tensor, p: int, anchor: int) -> Tensor:
        """Return the entry (B, T, M)."""
        entry = self.state_write(mean) + self.metadata_write(metadata.to(mean.dtype))
        return entry + self.pass_embeddings[p] + self.anchor_embeddings[anchor]


class Continuation(nn.Module):
    """The FP32 head that says, at the end of a pass, how probable another one is."""

    def __init__(self, config: Metis16Config):
        super().__init__()
        D, R = config.hidden_size, config.route_feature_dim
        self.limit = config.continuation_logit_limit
        self.hidden = nn.Linear(3 * D + R, R, dtype=torch.float32)
        self.output = nn.Linear(R, 1, dtype=torch.float32)

    def forward(
        self, c: Tensor, summary: Tensor, difference: Tensor, route_features: Tensor
    ) -> Tensor:
        """Return the probability, (B, T, 1)."""
        c, difference = c.float(), difference.float()
        features = torch.cat([c, summary.float(), difference, route_features.float()], dim=-1)
        h = F.silu(self.hidden(features))
        change = self._rms(difference) / self._rms(c).clamp(min=1e-6)
        return (self.output(h) + change.tanh() - 0.5).clamp(-self.limit, self.limit).sigmoid()

    @staticmethod
    def _rms(x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True).sqrt()


class Layer(nn.Module):
    def __init__(self, config: Metis16Config, index: int):
        super().__init__()
        self.is_attention = index in config.attention_layer_indices
        self.mixer_connection = HyperConnection(config)
        self.moe_connection = HyperConnection(config)
        # The training runtime wraps its Mamba mixer twice, and the names of the tensors show it.
        self.mixer: nn.Module
        if self.is_attention:
            self.mixer = Attention(config)
        else:
            self.mixer = nn.ModuleDict({"impl": nn.ModuleDict({"mixer": Mamba2(config)})})
        self.moe = LatentMoE(config)

    def forward(
        self,
        S: Tensor,
        p: int,
        pass_embedding: Tensor,
        route_features: Tensor,
        state: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the streams, and what the experts' routing tells the memory."""
        mixer = self.mixer if self.is_attention else self.mixer.get_submodule("impl.mixer")
        mixed, u, w = self.mixer_connection(S, pass_embedding)
        S = HyperConnection.write(mixed, w, mixer(u, p, state))
        mixed, u, w = self.moe_connection(S, pass_embedding)
        o, coalition, certainty = self.moe(u, route_features)
        return HyperConnection.write(mixed, w, o), coalition, certainty


class Metis16Cache:
    """What the mixers keep between steps: per (pass, layer) conv and SSM states, or K and V."""

    is_compileable = False

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.seen_tokens = 0

    def state(self, p: int, layer: int) -> dict[str, Tensor]:
        return self.states.setdefault((p, layer), {})

    def get_seq_length(self) -> int:
        return self.seen_tokens


@dataclass
class Metis16Output(CausalLMOutputWithPast):
    """The usual output, and where a trace was asked for: what the network passed through.

    streams (P*L, B, T, S, D): after every block, in order of execution, before its memory write.
    continuation (P, B, T): probability at the end of each pass.
    final_hidden (B, T, D): after the final norm.
    """

    streams: Tensor | None = None
    continuation: Tensor | None = None
    final_hidden: Tensor | None = None


class Metis16ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Metis16Config
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "embedding.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = list(UNUSED_TENSORS)
    _supports_sdpa = True

    def __init__(self, config: Metis16Config):
        super().__init__(config)
        D = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, D)
        self.lm_head = nn.Linear(D, config.vocab_size, bias=False)
        self.stream_embeddings = nn.Parameter(torch.zeros(config.n_streams, D))
        controls = config.mhc_pass_embedding_dim
        self.pass_embeddings = nn.Parameter(torch.zeros(config.max_passes, controls))
        self.depth_memory = DepthMemory(config)
        self.continuation = Continuation(config)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, index) for index in layers)
        self.final_norm = RMSNorm(D, config.rms_norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Metis16Cache | None = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_trace: bool = False,
    ) -> Metis16Output:
        """Return logits (B, T, V) in FP32, with the loss, the cache and the trace where asked for.

        Args:
            input_ids: (B, T); with a cache, only the tokens that it has not seen.
            attention_mask: accepted where it masks nothing: sequences of a batch have one length.
            labels: (B, T), -100 where no loss is wanted; shifted here, as usual.
            logits_to_keep: positions from the end, or their indices; 0 keeps all.
            output_trace: fill the fields that `Metis16Output` adds.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "the reference takes sequences of one length without padding, but attention_mask "
                "has zeros; run each sequence alone, or group those of equal length"
            )
        cache = Metis16Cache() if past_key_values is None else past_key_values
        S, streams, continuation = self._run_stack(input_ids, cache, output_trace)
        cache.seen_tokens += input_ids.shape[1]
        hidden = self.final_norm(S.mean(2))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept]).float()
        vocab_size = self.config.vocab_size
        return Metis16Output(
            loss=None if labels is None else self.loss_function(logits, labels, vocab_size),
            logits=logits,
            past_key_values=cache if use_cache else None,
            streams=torch.stack(streams) if output_trace else None,
            continuation=torch.stack(continuation) if output_trace else None,
            final_hidden=hidden if output_trace else None,
        )

    def _run_stack(
        self, input_ids: Tensor, cache: Metis16Cache, output_trace: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the last streams, those after every block for a trace, and the continuation."""
        config, memory = self.config, self.depth_memory
        S = self.embedding(input_ids).unsqueeze(2) + self.stream_embeddings
        previous = S.mean(2)
        no_difference = torch.zeros_like(previous)
        zeros = partial(previous.new_zeros, *input_ids.shape, dtype=torch.float32)
        history, cont = zeros(config.route_feature_dim), zeros(1)
        k_share = torch.full_like(cont, config.num_experts_per_tok / config.max_routed_k)
        bank: list[Tensor] = []
        streams: list[Tensor] = []
        continuation: list[Tensor] = []

        for p in range(config.num_passes):
            anchor = 0
            for index, layer in enumerate(self.layers):
                S, summary = memory.read(S, bank)
                rf = memory.route_features(S.mean(2), summary, no_difference, history)
                state = cache.state(p, index)
                S, coalition, certainty = layer(S, p, self.pass_embeddings[p], rf, state)
                if output_trace:  # of a long prompt they take gigabytes
                    streams.append(S)
                history = 0.5 * history + 0.5 * coalition
                if layer.is_attention:
                    metadata = torch.cat([coalition, k_share, certainty, cont], dim=-1)
                    bank.append(memory.write(S.mean(2), metadata, p, anchor))
                    anchor += 1
            S, summary = memory.read(S, bank)
            c = S.mean(2)
            rf = memory.route_features(c, summary, c - previous, history)
            cont = self.continuation(c, summary, c - previous, rf)
            continuation.append(cont.squeeze(-1))
            metadata = torch.cat([coalition, k_share, certainty, cont], dim=-1)
            bank.append(memory.write(c, metadata, p, anchor))
            previous = c
        return S, streams, continuation

    def simulate_fp8(self, scale: Literal["channel", "tensor"] | None = "channel") -> None:
        """Compute, from now on, what these weights compute in FP8; None ends it.

        Rounded are the linears that FP8 checkpoints quantize: routed experts, Mamba in_proj, attention
        qkv and out; the rest stays as it is. Such a checkpoint has a scale for each output channel,
        and vLLM, where it rounds on load, one for each tensor.
        """
        for module in self.modules():
            if isinstance(module, QuantizableLinear):
                module.simulate_fp8(scale)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` leaves the cache to `forward`, which makes a Metis16Cache.

    @classmethod
    def from_pretrained(
        cls, folder: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load as Transformers does, but refuse what does not fit instead of drawing it at random.

        Raises:
            ValueError: lists every tensor missing, unread or of another shape.
        """
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(folder, *args, **kwargs)
        faults = [f"missing: {name}" for name in sorted(info["missing_keys"])]
        faults += [f"unread: {name}" for name in sorted(info["unexpected_keys"])]
        faults += [
            f"shape of {name}: expected {tuple(wanted)}, found {tuple(found)}"
            for name, found, wanted in sorted(info["mismatched_keys"])
        ]
        tied = model.lm_head.weight is model.embedding.weight
        if not faults and model.config.tie_word_embeddings and not tied:
            faults = ["lm_head.weight differs from embedding.weight; tie_word_embeddings is true"]
        if faults:
            listed = "\n  ".join(faults)
            raise ValueError(f"{folder} does not hold the reference's tensors:\n  {listed}")
        return (model, info) if output_loading_info else model


def load_reference(folder: Path | str, dtype: torch.dtype = torch.float32) -> Metis16ForCausalLM:
    """Return the checkpoint's model in evaluation mode, spelled as the training runtime spells it.

    Args:
        dtype: the model dtype; what is FP32 always stays so.
    Raises:
        ValueError: the folder lacks a file, or a tensor is missing, unread or of another shape.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not any(folder.glob("model*.safetensors")):
        raise ValueError(f"{folder} is no checkpoint: it needs config.json and model*.safetensors")
    return Metis16ForCausalLM.from_pretrained(folder, dtype=dtype)
