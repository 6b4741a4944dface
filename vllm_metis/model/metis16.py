# SPDX-License-Identifier: Apache-2.0
"""Metis-1.6 for vLLM: a hybrid stack that runs P times per token over the same weights.

Letters: `T` tokens of the flat batch, `S` residual streams, `P` passes, `L` layers, `D` hidden
size, `R` route features, `M` memory width, `N` entries in the bank, `E` experts, `K` top-k.

The forward pass, in the order of docs/model.md:

1. The embedding is copied to S streams, each with a learned offset.
2. For each pass and layer: the depth memory is read into the streams; the router's features
   are made of it; the mixer (attention or Mamba-2) and the latent MoE each read one mixture
   of the streams and write back to all of them; attention layers write to the memory.
3. At the end of each pass the memory is read again, and written but after the last.
4. The mean of the streams is normed and meets the tied head.

What a sublayer gives stays beside the streams (`Unwritten`) until the operator that reads them next
writes it back, so that all that happens between two sublayers is one kernel (`stream_ops`).

Adapted in structure from vllm/model_executor/models/nemotron_h.py (vLLM 0.31.0).
"""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFunc,
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    MambaStateShapes,
    SupportsQuant,
)
from vllm.model_executor.models.utils import maybe_prefix
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from vllm_metis.checkpoint.audit import CheckpointError
from vllm_metis.checkpoint.load import load
from vllm_metis.checkpoint.names import MAPPER
from vllm_metis.checkpoint.specs import PACKED
from vllm_metis.config import Metis16Config
from vllm_metis.model.attention import Metis16Attention, PassAttention
from vllm_metis.model.depth_memory import Bank, Continuation, DepthMemory
from vllm_metis.model.few_tokens import FeatureInputs
from vllm_metis.model.hyper_connections import HyperConnection
from vllm_metis.model.mamba import Metis16Mamba
from vllm_metis.model.moe import LatentMoE
from vllm_metis.model.router import Routing
from vllm_metis.model.stream_ops import MemoryRead, Reading, Unwritten, write_mean, write_read
from vllm_metis.model.streams import stream_mean


class Metis16DecoderLayer(nn.Module):
    """One layer: a mixer and a latent MoE, each behind its own hyper-connection."""

    def __init__(
        self, config: Metis16Config, vllm_config: VllmConfig, index: int, prefix: str
    ) -> None:
        super().__init__()
        quant_config, cache_config = vllm_config.quant_config, vllm_config.cache_config
        attention = config.attention_layer_indices
        self.anchor = attention.index(index) if index in attention else None
        self.mixer_connection = HyperConnection(config)
        if self.anchor is None:
            self.mixer = Metis16Mamba(
                config, vllm_config.model_config, cache_config, quant_config, f"{prefix}.mixer"
            )
        else:
            self.mixer = Metis16Attention(config, cache_config, quant_config, f"{prefix}.mixer")
        self.moe_connection = HyperConnection(config)
        self.moe = LatentMoE(config, quant_config, f"{prefix}.moe")

    def forward(
        self, read: MemoryRead, inputs: FeatureInputs, pass_index: int
    ) -> tuple[Unwritten, Routing]:
        """Return the streams with the experts' output and what is told of the routing.

        Args:
            read: The streams after the memory read, and the mixer's mixture of them.
            inputs: Of the router's features. Nothing in the mixer waits for these, so they are
                made beside its first product.
        """
        output, route_features = self.mixer(read.normed, inputs, pass_index)
        streams, hidden_states = write_read(
            self.mixer_connection.unwritten(read.streams, output, pass_index),
            self.moe_connection.reading(pass_index),
        )
        output, routing = self.moe(hidden_states, route_features, inputs.history)
        return self.moe_connection.unwritten(streams, output, pass_index), routing


@support_torch_compile
class Metis16Model(nn.Module):
    """Embedding, the stack run P times, final norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Metis16Config = vllm_config.model_config.hf_config
        config.check()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.stream_embeddings = nn.Parameter(
            torch.empty(config.num_streams, config.hidden_size), requires_grad=False
        )
        self.pass_embeddings = nn.Parameter(
            torch.empty(config.num_passes, config.pass_embedding_dim), requires_grad=False
        )
        self.layers = nn.ModuleList(
            Metis16DecoderLayer(config, vllm_config, i, f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.depth_memory = DepthMemory(config, f"{prefix}.depth_memory")
        self.continuation = Continuation(config, f"{prefix}.continuation")
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the normed mean of the streams, (T, D), model dtype."""
        x = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
        unwritten = Unwritten(x[:, None] + self.stream_embeddings)
        previous = stream_mean(unwritten.streams)
        history = x.new_zeros((x.shape[0], self.config.route_feature_dim), dtype=torch.float32)
        continuation = history[:, :1]
        bank: Bank = []
        memory = self.depth_memory
        head = Reading(None, self.final_norm.weight, self.final_norm.variance_epsilon)

        for pass_index in range(self.config.num_passes):
            for layer in self.layers:
                read = memory.read(unwritten, bank, layer.mixer_connection.reading(pass_index))
                inputs = memory.feature_inputs(read, history)
                unwritten, routing = layer(read, inputs, pass_index)
                history = routing.history
                if layer.anchor is not None:
                    streams, mean = write_mean(unwritten)
                    unwritten = Unwritten(streams)
                    memory.write(bank, mean, routing, continuation, pass_index, layer.anchor)

            read = memory.read(unwritten, bank, head)
            unwritten = Unwritten(read.streams)
            if pass_index + 1 == self.config.num_passes:
                break  # the continuation and a write would be read by nobody
            difference = read.mean - previous
            features = memory.pass_features(read.mean, read.summary, difference, history)
            continuation = self.continuation(read.mean, read.summary, difference, features)
            anchor = self.config.num_anchors - 1
            memory.write(bank, read.mean, routing, continuation, pass_index, anchor)
            previous = read.mean

        return read.normed


class Metis16ForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsQuant):
    """The model behind `architectures: ["Metis16ForCausalLM"]`."""

    hf_to_vllm_mapper = MAPPER
    packed_modules_mapping = PACKED

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return MambaStateDtypeCalculator.mamba2_state_dtype(
            vllm_config.model_config.dtype,
            vllm_config.cache_config.mamba_cache_dtype,
            vllm_config.cache_config.mamba_ssm_cache_dtype,
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> MambaStateShapes:
        """Shapes of the conv and SSM state of one (layer, pass) on one rank."""
        config: Metis16Config = vllm_config.model_config.hf_config
        return MambaStateShapeCalculator.mamba2_state_shape(
            intermediate_size=config.mamba_d_inner,
            tp_world_size=vllm_config.parallel_config.tensor_parallel_size,
            n_groups=config.mamba_n_groups,
            num_heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            state_size=config.mamba_d_state,
            conv_kernel=config.mamba_d_conv,
            num_spec=vllm_config.num_speculative_tokens,
        )

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Metis16Config = vllm_config.model_config.hf_config
        self.config = config
        self.holds_weights = False
        self.vllm_config = vllm_config
        self.quant_config = vllm_config.quant_config
        self.model = Metis16Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        states = self.get_mamba_state_dtype_from_config(vllm_config)
        for module in self.modules():
            if isinstance(module, Metis16Mamba):
                module.check_states(states)
        attentions = [module for module in self.modules() if isinstance(module, PassAttention)]
        for attention in attentions[-1:]:  # the last one to be finished
            attention.after_loading = self.process_weights_after_loading

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a whole checkpoint, and fail with every tensor that is left over or missing.

        Raises:
            CheckpointError: as `checkpoint.load.load`; or weights were loaded before, on a CPU.
        """
        if self.holds_weights and current_platform.is_cpu():
            raise CheckpointError(
                "weights cannot be reloaded on a CPU: vLLM 0.31 packs experts only when they are "
                "first loaded, so the answers would be wrong; start a new engine"
            )
        loaded = load(self, weights)
        self.holds_weights = True
        return loaded

    def process_weights_after_loading(self) -> None:
        """Compute what depends on weights alone; vLLM calls it after its own post-processing."""
        for module in self.model.modules():
            if isinstance(module, HyperConnection):
                module.finalize(self.model.pass_embeddings)
            elif isinstance(module, (Metis16Attention, DepthMemory, LatentMoE)):
                module.finalize()
