# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints: how they are written, and that vLLM builds what is stored in them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.__main__ import main
from harness.checkpoints.quantize import FP8, FP8_MAX, quantize, quantize_checkpoint
from harness.scoring.child import Scorer
from tests.weights.meta import faults_of, headers
from vllm_metis.checkpoint.load import dequantized
from vllm_metis.checkpoint.quantization import QuantizationError, describe_to_vllm, stored_dtypes

SCHEME = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}


def test_a_weight_is_rounded_with_one_scale_per_output_channel():
    torch.manual_seed(0)
    weight = torch.randn(3, 5, 64) * torch.logspace(-4, 4, 15).view(3, 5, 1)
    rounded, scale = quantize(weight)
    assert rounded.dtype == FP8
    assert scale.shape == (3, 5, 1)
    assert torch.equal(rounded.float().abs().amax(-1), torch.full((3, 5), FP8_MAX))
    # E4M3 has 3 bits of mantissa: half a step is 1/16 of the value at most.
    error = (rounded.float() * scale - weight).abs()
    assert (error <= weight.abs() / 16 + scale * 2**-10).all()


def test_a_channel_of_zeros_stays_zero():
    rounded, scale = quantize(torch.zeros(2, 8))
    assert torch.equal(rounded.float() * scale, torch.zeros(2, 8))


@pytest.mark.parametrize(
    "spelling", ["", "expert_layout=stacked,qkv=apart,gate_up=apart,mamba=mixer"]
)
def test_the_listed_modules_are_quantized_and_all_else_is_copied(checkpoint, tmp_path, spelling):
    source = checkpoint("tiny", spelling, dtype="bfloat16")
    quantize_checkpoint(source, tmp_path / "fp8")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "fp8" / "model.safetensors")
    quantized = {name for name, tensor in after.items() if tensor.dtype == FP8}
    kinds = ("experts", "in_proj", "qkv", "_proj.weight", "mixer.out.weight")
    assert all(any(kind in name for kind in kinds) for name in quantized)
    assert not any("out_proj" in n or "shared" in n or "lora" in n for n in quantized)
    for name, tensor in before.items():
        if name in quantized:
            scale = after[f"{name.removesuffix('.weight')}.weight_scale"]
            rounded, expected = quantize(tensor)
            assert torch.equal(after[name].float(), rounded.float())
            assert torch.equal(scale, expected)
        else:
            assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("scale_axes", [1, 2])
@pytest.mark.parametrize("spelling", ["", "expert_layout=stacked", "gate_up=apart,qkv=apart"])
def test_a_quantized_checkpoint_passes_the_audit(checkpoint, tmp_path, spelling, scale_axes):
    quantize_checkpoint(checkpoint("tiny", spelling), tmp_path / "fp8", scale_axes=scale_axes)
    assert faults_of(tmp_path / "fp8", headers(tmp_path / "fp8")) == []


def test_a_missing_scale_is_named(checkpoint, tmp_path):
    quantize_checkpoint(checkpoint("tiny"), tmp_path / "fp8")
    tensors = headers(tmp_path / "fp8")
    del tensors["layers.3.moe.local_experts.7.down.weight_scale"]
    (fault,) = faults_of(tmp_path / "fp8", tensors)
    assert "model.layers.3.moe.experts.7.down_proj.weight_scale: missing" in fault


def test_shards_and_their_index_are_kept(checkpoint, tmp_path):
    source = checkpoint("tiny", shard_bytes=2**21)
    quantize_checkpoint(source, tmp_path / "fp8")
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        stored = set(load_file(tmp_path / "fp8" / file))
        assert stored == {name for name, at in index["weight_map"].items() if at == file}
    assert faults_of(tmp_path / "fp8", headers(tmp_path / "fp8")) == []


@pytest.mark.parametrize(
    ("make", "expected"), [("nothing", "expected config.json"), ("both", "exists")]
)
def test_the_command_refuses_what_it_cannot_do(checkpoint, tmp_path, capsys, make, expected):
    source = tmp_path / "empty" if make == "nothing" else checkpoint("tiny")
    target = tmp_path / "fp8"
    if make == "both":
        target.mkdir()
    assert main(["quantize", str(source), str(target)]) == 2
    assert expected in capsys.readouterr().err


def dtypes(folder: Path) -> dict[str, str]:
    return {name: str(t.dtype).removeprefix("torch.") for name, t in headers(folder).items()}


@pytest.mark.parametrize("with_out_proj", [False, True])
@pytest.mark.parametrize(
    "spelling", ["", "prefix=model,expert_layout=stacked,qkv=apart,mamba=mixer"]
)
def test_vllm_is_told_the_modules_whose_weights_are_not_float8(
    checkpoint, tmp_path, spelling, with_out_proj
):
    quantize_checkpoint(checkpoint("tiny", spelling), tmp_path / "fp8", with_out_proj)
    found = describe_to_vllm(SCHEME, dtypes(tmp_path / "fp8"), dequantize_experts=False)
    mamba = [f"model.layers.{i}.mixer.mamba.out_proj" for i in (0, 2, 3, 5)]
    assert found["ignore"] == ([] if with_out_proj else mamba)


@pytest.mark.parametrize(
    ("wanted", "out_proj"),
    [("none", "float32"), ("fp8", "float32"), ("fp8_with_out_proj", "float8_e4m3fn")],
)
def test_a_cell_is_served_the_quantization_that_it_names(tmp_path, wanted, out_proj):
    cell = {"shape": "tiny", "dtype": "float32", "seed": 1, "taught": False, "quantize": wanted}
    reply = Scorer(tmp_path, tmp_path).handle({"do": "checkpoint", "checkpoint": cell})
    found = dtypes(Path(reply.served))
    assert {d for name, d in found.items() if name.endswith("out_proj.weight")} == {out_proj}
    assert ("float8_e4m3fn" in found.values()) == (wanted != "none")


def test_experts_of_one_layer_may_be_left_unquantized():
    headers = {
        "layers.0.moe.local_experts.0.down.weight": "F8_E4M3",
        "layers.3.moe.local_experts.0.down.weight": "BF16",
    }
    found = describe_to_vllm(SCHEME, headers, dequantize_experts=False)
    assert found["ignore"] == [r"re:model\.layers\.3\.moe\.experts\..*"]


def test_a_module_that_is_float8_in_part_is_refused_by_name():
    headers = {
        "layers.3.moe.local_experts.0.down.weight": "F8_E4M3",
        "layers.3.moe.local_experts.1.down.weight": "BF16",
    }
    assert stored_dtypes(headers) == {"model.layers.3.moe.experts": {"F8_E4M3", "BF16"}}
    with pytest.raises(QuantizationError, match=r"model.layers.3.moe.experts \(BF16 and F8_E4M3\)"):
        describe_to_vllm(SCHEME, headers, dequantize_experts=False)


def test_more_than_one_scheme_is_refused():
    with pytest.raises(QuantizationError, match="has 0 config_groups; expected one"):
        describe_to_vllm({}, {}, dequantize_experts=False)


def test_experts_are_expanded_exactly_whichever_of_weight_and_scale_comes_first():
    weight, scale = quantize(torch.randn(6, 8))
    name = "model.layers.0.moe.experts.3.down_proj.weight"
    pair = [(name, weight), (f"{name}_scale", scale)]
    for pieces in (pair, pair[::-1]):
        ((found, expanded),) = dequantized(pieces)
        assert found == name
        assert torch.equal(expanded, weight.float() * scale)


def test_float8_outside_the_experts_is_not_expanded():
    pieces = [("model.layers.0.mixer.mamba.in_proj.weight", quantize(torch.randn(6, 8))[0])]
    assert list(dequantized(pieces)) == pieces
