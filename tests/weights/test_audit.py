# SPDX-License-Identifier: Apache-2.0
"""The audit of a checkpoint: every spelling is read, and nothing else passes unnoticed."""

import json
from pathlib import Path

import pytest
import torch

from harness.checkpoints.spelling import AXES
from tests.conftest import GOLDEN
from tests.weights.meta import ALL_AT_ONCE, faults_of, headers
from vllm_metis.checkpoint.audit import Audit
from vllm_metis.checkpoint.load import fitted
from vllm_metis.checkpoint.names import MAPPER
from vllm_metis.config import Metis16Config

SPELLINGS = [f"{axis}={value}" for axis, values in AXES.items() for value in values[1:]]


@pytest.mark.parametrize("spelling", ["", *SPELLINGS, ALL_AT_ONCE])
def test_every_spelling_of_a_release_is_read_whole(checkpoint, spelling):
    folder = checkpoint("tiny", spelling)
    assert faults_of(folder, headers(folder)) == []


@pytest.mark.parametrize("golden", ["tiny", "tiny16"])
def test_the_training_runtimes_checkpoint_is_read_whole(golden):
    folder = GOLDEN / golden
    tensors = {k: v for k, v in headers(folder).items() if not k.startswith("prompt")}
    assert faults_of(folder, tensors) == []


@pytest.fixture
def tiny(checkpoint) -> Path:
    return checkpoint("tiny")


def changed(folder: Path, **changes: torch.Tensor | None) -> list[str]:
    """Return the faults of a checkpoint with tensors replaced, added or (None) removed."""
    tensors = headers(folder) | changes
    return faults_of(folder, {name: t for name, t in tensors.items() if t is not None})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_renamed_tensor_is_both_unread_and_unset(tiny):
    name = "layers.0.mixer.impl.mixer.dt_bias"
    faults = changed(tiny, **{name: None, "layers.0.mixer.impl.mixer.dt_offset": meta(16)})
    assert len(faults) == 2
    assert "layers.0.mixer.impl.mixer.dt_offset: not a tensor of this model" in faults[0]
    assert "model.layers.0.mixer.mamba.dt_bias: missing" in faults[1]


def test_a_missing_expert_is_named(tiny):
    (fault,) = changed(tiny, **{"layers.3.moe.local_experts.7.down.weight": None})
    assert fault == "model.layers.3.moe.experts.7.down_proj.weight: missing, so it would be unset"


def test_an_extra_tensor_is_named(tiny):
    (fault,) = changed(tiny, **{"layers.0.moe.balance": meta(16)})
    assert fault == "layers.0.moe.balance: not a tensor of this model, so it would be unread"


def test_an_expert_beyond_the_configured_number_is_named(tiny):
    (fault,) = changed(tiny, **{"layers.0.moe.local_experts.16.down.weight": meta(128, 64)})
    assert "layers.0.moe.local_experts.16.down.weight: not a tensor of this model" in fault


def test_a_wrong_shape_is_named_with_what_the_configuration_implies(tiny):
    (fault, unset) = changed(tiny, **{"layers.1.mixer.qkv.weight": meta(500, 256)})
    assert fault.startswith(
        "layers.1.mixer.qkv.weight: shape [500, 256], where config.json implies"
    )
    assert "model.layers.1.mixer.qkv_proj.weight: missing" in unset


def test_a_narrowed_float32_tensor_is_named(tiny):
    name = "layers.0.mixer.impl.mixer.A_log"
    faults = changed(tiny, **{name: meta(16, dtype=torch.bfloat16)})
    assert faults[0] == f"{name}: bfloat16, where the model has float32"


@pytest.mark.parametrize(
    "name",
    [
        "depth_budget.multiplier",
        "model.depth_budget.multiplier",
        "layers.0.moe.k_router.weight",
        "layers.5.moe.k_budget.multiplier",
    ],
)
def test_heads_that_the_release_does_not_use_are_passed_by_name(name):
    assert MAPPER.map_name(name) is None


def test_a_tensor_stored_in_two_spellings_is_named(tiny):
    twin = headers(tiny)["layers.1.mixer.out.weight"]
    (fault,) = changed(tiny, **{"model.layers.1.mixer.out.weight": twin})
    assert "stored twice, in different spellings of model.layers.1.mixer.o_proj.weight" in fault


def test_half_of_a_packed_tensor_names_the_other_half(tiny):
    faults = changed(
        tiny, **{"layers.1.mixer.qkv.weight": None, "layers.1.mixer.q_proj.weight": meta(256, 256)}
    )
    assert faults == [
        f"model.layers.1.mixer.{part}_proj.weight: missing, so it would be unset" for part in "kv"
    ]


def test_a_table_with_too_few_passes_is_named(tiny):
    faults = changed(tiny, pass_embeddings=meta(1, 64))
    assert faults[0].startswith(
        "pass_embeddings: shape [1, 64], where config.json implies at least"
    )


def test_all_faults_are_reported_together(tiny):
    faults = changed(
        tiny,
        **{
            "layers.0.moe.balance": meta(16),
            "final_norm.weight": None,
            "stream_embeddings": meta(4, 255),
        },
    )
    assert len(faults) == 4  # the misshapen tensor is unset too


def test_without_tying_a_missing_head_is_named(tiny):
    config = json.loads((tiny / "config.json").read_text()) | {"tie_word_embeddings": False}
    audit = Audit(Metis16Config(**config))
    for name, tensor in headers(tiny).items():
        if name != "lm_head.weight":
            list(audit.admit(name, tensor))
    assert audit.faults() == ["lm_head.weight: missing, so it would be unset"]


def test_float8_weights_need_their_scales_and_a_configuration_that_says_so(tiny):
    name = "layers.0.mixer.impl.mixer.in_proj.weight"
    shape = headers(tiny)[name].shape
    faults = changed(tiny, **{name: meta(*shape, dtype=torch.float8_e4m3fn)})
    assert "model.layers.0.mixer.mamba.in_proj.weight_scale: missing" in faults[0]
    assert "config.json has no quantization_config" in faults[1]


def test_a_scale_beside_an_unquantized_weight_is_named(tiny):
    name = "layers.0.mixer.impl.mixer.in_proj.weight"
    rows = headers(tiny)[name].shape[0]
    (fault,) = changed(tiny, **{f"{name}_scale": meta(rows)})
    assert fault.endswith("model.layers.0.mixer.mamba.in_proj.weight is not FP8")


def test_float8_in_a_layer_that_is_never_quantized_is_named(tiny):
    name = "layers.0.moe.latent_down.weight"
    faults = changed(tiny, **{name: meta(128, 256, dtype=torch.float8_e4m3fn)})
    assert faults[0] == f"{name}: float8_e4m3fn, where the model has bfloat16 or float16 or float32"


@pytest.mark.parametrize("scale_shape", [(1,), (1, 1)], ids=["rows", "rows-by-1"])
def test_scales_are_read_with_and_without_a_second_axis(checkpoint, scale_shape):
    folder = checkpoint("tiny")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    audit = Audit(Metis16Config(**config))
    for name, tensor in headers(folder).items():
        if ".local_experts." in name:
            list(audit.admit(name, meta(*tensor.shape, dtype=torch.float8_e4m3fn)))
            scale = meta(tensor.shape[0], *scale_shape[1:])
            ((unit, piece),) = audit.admit(f"{name}_scale", scale)
            assert unit.endswith(".weight_scale")
            assert piece.shape == (tensor.shape[0], 1)
        else:
            list(audit.admit(name, tensor))
    assert audit.faults() == []


def test_experts_are_padded_where_tensor_parallelism_does_not_divide_them():
    values = json.loads((GOLDEN / "tiny" / "config.json").read_text())
    config = Metis16Config(**values)
    x = torch.randn(5, config.moe_latent_size)

    def swiglu(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ gate_up.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ down.T

    gate_up = torch.randn(2 * config.moe_intermediate_size, config.moe_latent_size)
    down = torch.randn(config.moe_latent_size, config.moe_intermediate_size)
    at = "model.layers.0.moe.experts.3"
    padded_gate_up = fitted(config, 3, f"{at}.gate_up_proj.weight", gate_up)
    padded_down = fitted(config, 3, f"{at}.down_proj.weight", down)
    assert padded_gate_up.shape[0] == 2 * padded_down.shape[1] == 96
    torch.testing.assert_close(swiglu(padded_gate_up, padded_down), swiglu(gate_up, down))
