# SPDX-License-Identifier: Apache-2.0
"""The configuration of Metis-1.6, and the one place that knows how its keys are spelled.

A release may use Transformers' usual key names or those of the training manifest. Each
field is read under every name listed in `FIELDS`; a required one that is under none of
them is an error that says so, and a constant of the architecture that is left out is
assumed with a warning. Sizes are checked against the checkpoint by `checkpoint.audit`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PretrainedConfig

logger = logging.getLogger("vllm.metis")

REQUIRED = object()


class ConfigError(ValueError):
    """A config.json that does not describe a Metis-1.6 model; the message lists every fault."""


@dataclass(frozen=True)
class Field:
    """One value of the configuration.

    Attributes:
        spellings: Keys under which a release may store it; the first is the attribute.
        default: REQUIRED, a value to assume with a warning, or a function of the fields
            read before it (a derived size, taken without a warning).
    """

    spellings: tuple[str, ...]
    default: Any = REQUIRED

    @property
    def name(self) -> str:
        return self.spellings[0]


def _required(*spellings: str) -> Field:
    return Field(spellings)


def _constant(value: Any, *spellings: str) -> Field:
    return Field(spellings, value)


def _derived(rule: Callable[[Mapping[str, Any]], Any], *spellings: str) -> Field:
    return Field(spellings, rule)


FIELDS = (
    _required("vocab_size", "padded_vocab_size"),
    _required("hidden_size", "d_model", "model_dim"),
    _required("num_hidden_layers", "n_layers", "num_layers"),
    _required("max_position_embeddings", "max_seq_len", "context_length", "max_sequence_length"),
    _required("num_passes", "n_passes"),
    _derived(lambda f: f["num_passes"], "max_passes", "training_max_passes"),
    _required("attention_layer_indices", "attention_layers", "attn_layer_indices"),
    # Attention.
    _required("num_attention_heads", "n_heads", "num_heads"),
    _required("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    _derived(
        lambda f: f["hidden_size"] // f["num_attention_heads"],
        "head_dim",
        "attention_head_dim",
        "attn_head_dim",
    ),
    _required("attention_pass_lora_rank", "pass_lora_rank", "lora_rank"),
    # Mamba-2.
    _derived(lambda f: 2, "mamba_expand", "expand"),
    _derived(
        lambda f: f["mamba_expand"] * f["hidden_size"],
        "mamba_d_inner",
        "mamba_intermediate_size",
        "d_inner",
    ),
    _required("mamba_head_dim", "mamba_headdim", "mamba_d_head", "headdim"),
    _derived(
        lambda f: f["mamba_d_inner"] // f["mamba_head_dim"],
        "mamba_num_heads",
        "mamba_n_heads",
        "mamba_nheads",
    ),
    _required("mamba_n_groups", "mamba_ngroups", "n_groups", "ngroups"),
    _required("mamba_d_state", "ssm_state_size", "state_size", "d_state"),
    _required("mamba_d_conv", "conv_kernel", "mamba_conv_kernel", "d_conv"),
    _constant(256, "mamba_chunk_size", "chunk_size"),
    # Residual streams and depth memory.
    _required("num_streams", "n_streams", "mhc_streams", "hyper_connection_streams"),
    _required("pass_embedding_dim", "mhc_pass_embedding_dim"),
    _constant(8, "sinkhorn_iterations", "mhc_sinkhorn_iterations", "n_sinkhorn_iterations"),
    _required("route_feature_dim", "route_features_dim", "route_dim"),
    _required("memory_dim", "depth_memory_dim"),
    _constant(4.0, "continuation_logit_limit", "logit_limit"),
    # Latent MoE.
    _required("moe_latent_size", "latent_dim", "moe_latent_dim"),
    _required("num_experts", "n_routed_experts", "num_routed_experts", "num_local_experts"),
    _required("num_experts_per_tok", "num_experts_per_token", "routed_k", "moe_top_k"),
    _required("moe_intermediate_size", "expert_intermediate_dim", "expert_intermediate_size"),
    _derived(lambda f: 1, "num_shared_experts", "n_shared_experts"),
    _derived(lambda f: 8, "max_routed_k", "max_k"),
    # Norms.
    _constant(1e-6, "rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    _constant(1e-5, "mamba_norm_eps", "mamba_rms_norm_eps", "gated_norm_eps"),
)


class Metis16Config(PretrainedConfig):
    """Configuration of `model_type: metis16`, spellings normalized to the names of `FIELDS`.

    Reading never fails on a value, since vLLM applies `--hf-overrides` afterwards.
    `check()` does; the config hook, the model and `python -m vllm_metis check` call it.
    """

    model_type = "metis16"
    has_no_defaults_at_init = True
    attribute_map: ClassVar[dict[str, str]] = {
        alias: field.name for field in FIELDS for alias in field.spellings[1:]
    }

    def __init__(self, **kwargs: Any) -> None:
        self._contradictions: list[str] = []
        for field in FIELDS:
            found = {s: kwargs.pop(s) for s in field.spellings if kwargs.get(s) is not None}
            if len({repr(value) for value in found.values()}) > 1:
                keys = ", ".join(f"{key} = {value}" for key, value in found.items())
                self._contradictions.append(f"{field.name}: contradictory keys {keys}; keep one")
            if found:
                setattr(self, field.name, next(iter(found.values())))
        self._filled: list[str] = []
        self._fill()
        kwargs.setdefault("tie_word_embeddings", True)
        super().__init__(**kwargs)

    def _fill(self) -> None:
        """(Re)compute every field that neither config.json nor an override gives."""
        given = {f.name for f in FIELDS if f.name in self.__dict__} - set(self._filled)
        self._filled = []
        values: dict[str, Any] = {}
        for field in FIELDS:
            if field.name in given:
                values[field.name] = getattr(self, field.name)
                continue
            self.__dict__.pop(field.name, None)
            if field.default is REQUIRED:
                continue
            try:
                value = field.default(values) if callable(field.default) else field.default
            except (KeyError, TypeError, ZeroDivisionError):
                continue  # what it is derived from is missing, which `faults` reports
            values[field.name] = value
            setattr(self, field.name, value)
            self._filled.append(field.name)

    @property
    def layers_block_type(self) -> list[str]:
        """Kind of each layer, under the name vLLM's hybrid models use."""
        attention = set(self.attention_layer_indices)
        return ["attention" if i in attention else "mamba" for i in range(self.num_hidden_layers)]

    @property
    def conv_dim(self) -> int:
        """Channels of the depthwise convolution: x, B and C."""
        return self.mamba_d_inner + 2 * self.mamba_n_groups * self.mamba_d_state

    @property
    def num_anchors(self) -> int:
        """Depth-memory anchors of one pass: the attention layers and the end of the pass."""
        return len(self.attention_layer_indices) + 1

    def faults(self) -> list[str]:
        """Everything that is missing, contradictory or impossible, a sentence each."""
        self._fill()
        faults = list(self._contradictions)
        for field in FIELDS:
            if field.default is REQUIRED and field.name not in self.__dict__:
                faults.append(
                    f"{field.name}: missing; looked for the keys {', '.join(field.spellings)}"
                )
        if faults:
            return faults
        for field in FIELDS:
            value = getattr(self, field.name)
            if field.name == "attention_layer_indices":
                if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
                    faults.append(f"{field.name}: expected a list of layer numbers, found {value}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                faults.append(f"{field.name}: expected a positive number, found {value!r}")
        if faults:
            return faults
        for what, dividend, divisor in (
            ("query heads per KV head", "num_attention_heads", "num_key_value_heads"),
            ("Mamba heads per group", "mamba_num_heads", "mamba_n_groups"),
        ):
            a, b = getattr(self, dividend), getattr(self, divisor)
            if a % b:
                faults.append(f"{dividend} = {a} is not a multiple of {divisor} = {b} ({what})")
        if self.mamba_num_heads * self.mamba_head_dim != self.mamba_d_inner:
            faults.append(
                f"mamba_num_heads * mamba_head_dim = {self.mamba_num_heads} * "
                f"{self.mamba_head_dim} contradicts mamba_d_inner = {self.mamba_d_inner}"
            )
        if self.num_experts_per_tok > self.num_experts:
            faults.append(
                f"num_experts_per_tok = {self.num_experts_per_tok} exceeds "
                f"num_experts = {self.num_experts}"
            )
        if self.max_passes < self.num_passes:
            faults.append(f"max_passes = {self.max_passes} is below num_passes = {self.num_passes}")
        layers, indices = self.num_hidden_layers, self.attention_layer_indices
        if sorted(set(indices)) != indices or any(not 0 <= i < layers for i in indices):
            faults.append(
                f"attention_layer_indices = {indices}: expected rising layer numbers "
                f"from 0 to {layers - 1}"
            )
        elif not 0 < len(indices) < layers:
            faults.append(
                f"attention_layer_indices = {indices}: expected at least one attention and "
                f"one Mamba layer among {layers}"
            )
        if getattr(self, "hidden_act", "silu") not in ("silu", "swish"):
            faults.append(f"hidden_act = {self.hidden_act}: Metis-1.6 has SiLU throughout")
        return faults

    def check(self) -> None:
        """Raise on any fault; warn of each constant that is assumed.

        Raises:
            ConfigError: The configuration is unusable; the message lists every fault and
                how to supply a missing key.
        """
        faults = self.faults()
        if faults:
            raise ConfigError(
                "config.json does not describe a Metis-1.6 model:\n  - "
                + "\n  - ".join(faults)
                + "\nCorrect config.json, or pass the value on the command line, e.g. "
                "--hf-overrides '{\"num_experts_per_tok\": 4}'."
            )
        for field in FIELDS:
            if field.name in self._filled and not callable(field.default):
                logger.warning(
                    "config.json has none of the keys %s; assuming %s, the value of the "
                    "published models.",
                    ", ".join(field.spellings),
                    field.default,
                )
