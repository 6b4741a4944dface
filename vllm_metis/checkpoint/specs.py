# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a configuration implies: its name, its shape, and what may stand for it.

Names are vLLM's, with projections packed and experts apart; `names.MAPPER` brings those of
a checkpoint to them. Needs neither torch nor vLLM.

Source: docs/model.md, "Checkpoint tensors".
"""

from dataclasses import dataclass

from vllm_metis.config import Metis16Config

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Parameters that a checkpoint may hold whole or in parts, in the order of their rows."""

PADDED_WIDTH = 16
"""Multiple, per rank, to which expert widths are padded when a TP size does not divide them."""


@dataclass(frozen=True)
class Tensor:
    """What a checkpoint must hold under one name.

    Attributes:
        shape: As stored, before tensor parallelism.
        fp32: Whether the model defines it in FP32, so that nothing narrower will do.
        rows_at_least: Whether more rows than `shape` has may follow (tables per pass that
            were trained for more passes).
        quantizable: Whether FP8 with a scale per row may stand in its place.
    """

    shape: tuple[int, ...]
    fp32: bool = False
    rows_at_least: bool = False
    quantizable: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        if self.rows_at_least:
            return shape[1:] == self.shape[1:] and len(shape) > 0 and shape[0] >= self.shape[0]
        return shape == self.shape


def checkpoint_tensors(config: Metis16Config) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name after `names.MAPPER`, packed and unstacked."""
    hidden, features, width = config.hidden_size, config.route_feature_dim, config.memory_dim
    streams, passes = config.num_streams, config.num_passes
    latent, expert = config.moe_latent_size, config.moe_intermediate_size
    shared = expert * config.num_shared_experts
    heads, inner, conv = config.mamba_num_heads, config.mamba_d_inner, config.conv_dim
    q = config.num_attention_heads * config.head_dim
    qkv = q + 2 * config.num_key_value_heads * config.head_dim

    def linear(name: str, rows: int, columns: int, **kind: bool) -> dict[str, Tensor]:
        return {f"{name}.weight": Tensor((rows, columns), **kind)}

    def biased(name: str, rows: int, columns: int, **kind: bool) -> dict[str, Tensor]:
        return linear(name, rows, columns, **kind) | {f"{name}.bias": Tensor((rows,), **kind)}

    def connection(name: str) -> dict[str, Tensor]:
        return {
            f"{name}.norm.weight": Tensor((hidden,)),
            f"{name}.read_logits": Tensor((streams,)),
            f"{name}.write_logits": Tensor((streams,)),
            f"{name}.mix_logits": Tensor((streams, streams)),
        } | biased(f"{name}.controller", streams * (streams + 2), config.pass_embedding_dim)

    def attention(name: str) -> dict[str, Tensor]:
        return {
            **linear(f"{name}.qkv_proj", qkv, hidden, quantizable=True),
            **linear(f"{name}.o_proj", hidden, q, quantizable=True),
            **linear(f"{name}.pass_lora_down", config.attention_pass_lora_rank, hidden),
            **linear(f"{name}.pass_lora_up", qkv, config.attention_pass_lora_rank),
            f"{name}.pass_gates": Tensor((passes,), rows_at_least=True),
        }

    def mamba(name: str) -> dict[str, Tensor]:
        return {
            **linear(f"{name}.in_proj", inner + conv + heads, hidden, quantizable=True),
            f"{name}.conv1d.weight": Tensor((conv, 1, config.mamba_d_conv)),
            f"{name}.conv1d.bias": Tensor((conv,)),
            f"{name}.dt_bias": Tensor((heads,), fp32=True),
            f"{name}.A": Tensor((heads,), fp32=True),
            f"{name}.D": Tensor((heads,), fp32=True),
            f"{name}.norm.weight": Tensor((inner,)),
            **linear(f"{name}.out_proj", hidden, inner, quantizable=True),
        }

    def moe(name: str) -> dict[str, Tensor]:
        experts = {}
        for e in range(config.num_experts):
            at = f"{name}.experts.{e}"
            experts |= linear(f"{at}.gate_up_proj", 2 * expert, latent, quantizable=True)
            experts |= linear(f"{at}.down_proj", latent, expert, quantizable=True)
        return {
            **linear(f"{name}.latent_down", latent, hidden),
            **linear(f"{name}.latent_up", hidden, latent),
            f"{name}.expert_embeddings": Tensor((config.num_experts, features)),
            **biased(f"{name}.expert_router", config.num_experts, latent + features, fp32=True),
            f"{name}.selection_bias": Tensor((config.num_experts,), fp32=True),
            **linear(f"{name}.shared_expert.gate_up_proj", 2 * shared, latent),
            **linear(f"{name}.shared_expert.down_proj", latent, shared),
            **experts,
        }

    memory = "model.depth_memory"
    tensors = {
        **linear("model.embed_tokens", config.vocab_size, hidden),
        "model.stream_embeddings": Tensor((streams, hidden)),
        "model.pass_embeddings": Tensor((passes, config.pass_embedding_dim), rows_at_least=True),
        **biased(f"{memory}.state_write", width, hidden),
        **biased(f"{memory}.metadata_write", width, features + 4),
        **biased(f"{memory}.query", width, hidden),
        **biased(f"{memory}.key", width, width),
        **biased(f"{memory}.value", width, width),
        **biased(f"{memory}.output", hidden, width),
        f"{memory}.route_weight": Tensor((features, 3 * hidden + features)),
        f"{memory}.route_bias": Tensor((features,)),
        f"{memory}.pass_embeddings": Tensor((passes, width), rows_at_least=True),
        f"{memory}.anchor_embeddings": Tensor((config.num_anchors, width)),
        f"{memory}.stream_gate": Tensor((streams, hidden)),
        f"{memory}.stream_gate_bias": Tensor((streams,)),
        **biased("model.continuation.hidden", features, 3 * hidden + features, fp32=True),
        **biased("model.continuation.output", 1, features, fp32=True),
        "model.final_norm.weight": Tensor((hidden,)),
        **linear("lm_head", config.vocab_size, hidden),
    }
    for i, kind in enumerate(config.layers_block_type):
        layer = f"model.layers.{i}"
        tensors |= connection(f"{layer}.mixer_connection")
        tensors |= connection(f"{layer}.moe_connection")
        if kind == "attention":
            tensors |= attention(f"{layer}.mixer")
        else:
            tensors |= mamba(f"{layer}.mixer.mamba")
        tensors |= moe(f"{layer}.moe")
    return tensors


def parts_of(config: Metis16Config, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the parts that may stand in for a packed tensor, none where it is not packed."""
    for packed, parts in PACKED.items():
        if f".{packed}." not in name or "lora" in name:
            continue
        if packed == "qkv_proj":
            kv = config.num_key_value_heads * config.head_dim
            rows = [tensor.shape[0] - 2 * kv, kv, kv]
        else:
            rows = [tensor.shape[0] // len(parts)] * len(parts)
        return {
            name.replace(packed, part): Tensor(
                (count, *tensor.shape[1:]), quantizable=tensor.quantizable
            )
            for part, count in zip(parts, rows, strict=True)
        }
    return {}


def padded_expert_width(config: Metis16Config, tp_size: int) -> int:
    """Return the expert width that vLLM is given: padded with zeros where TP does not divide it."""
    width = config.moe_intermediate_size
    if width % tp_size == 0:
        return width
    step = PADDED_WIDTH * tp_size
    return -(-width // step) * step
