# SPDX-License-Identifier: Apache-2.0
"""`python -m harness loaded_weights`: what vLLM holds is the checkpoint's, and any difference shows."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from harness.__main__ import main
from harness.checkpoints.quantize import FP8, quantize_checkpoint
from harness.loaded_weights.command import before_packing, examine, examine_folder, table
from harness.loaded_weights.expected import Expectation, TensorComparison, fp8_steps
from harness.loaded_weights.stored import StoredWeights
from tests.weights.meta import ALL_AT_ONCE


def kinds(report) -> dict[str, int]:
    """Return how many tensors of each kind were compared."""
    found: dict[str, int] = {}
    for one in report.compared:
        found[one.kind] = found.get(one.kind, 0) + 1
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_held_bit_by_bit(checkpoint, dtype):
    report = examine_folder(checkpoint("tiny"), dtype, None)
    assert report.faults == []
    assert report.others == []
    assert sum(one.differing for one in report.compared) == 0
    assert "2 passes over one set of weights, 6 layers" in report.notes
    found = kinds(report)
    assert found["routed experts"] == 2 * 6
    assert found["attention qkv"] == 2
    assert found["constants"] == 6 * 2 * 3 + 2 + 5


def test_every_spelling_at_once_is_held_bit_by_bit(checkpoint):
    report = examine_folder(checkpoint("tiny", ALL_AT_ONCE), "float32", None)
    assert report.faults == []


@pytest.mark.parametrize(("spelling", "scale_axes"), [("", 2), (ALL_AT_ONCE, 1)])
def test_an_fp8_checkpoint_is_held_byte_by_byte(checkpoint, tmp_path, spelling, scale_axes):
    source = checkpoint("tiny", spelling, dtype="bfloat16")
    quantize_checkpoint(source, tmp_path / "fp8", scale_axes=scale_axes)
    report = examine_folder(tmp_path / "fp8", "auto", None)
    assert report.faults == []
    held = {one.name: one for one in report.compared}
    weight = held["model.layers.1.mixer.qkv_proj.weight"]
    assert weight.nbytes == weight.values
    assert "model.layers.1.mixer.qkv_proj.weight_scale" in held


@pytest.fixture(scope="module")
def folder(checkpoint) -> Path:
    return checkpoint("tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def held(folder) -> Iterator[nn.Module]:
    from vllm import EngineArgs

    with before_packing(EngineArgs(str(folder), skip_tokenizer_init=True)) as model:
        yield model


@pytest.fixture
def faults_after(folder, held) -> Iterator[Callable[..., list[str]]]:
    """Return a function that changes a held tensor in place and gives the faults found."""
    changed = []

    def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
        tensor = {**dict(held.named_parameters()), **dict(held.named_buffers())}[name]
        changed.append((tensor, tensor.clone()))
        tensor.data.copy_(how(tensor.clone()))
        return examine(held, StoredWeights(folder)).faults

    yield change
    for tensor, before in changed:
        tensor.data.copy_(before)


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2, dim=-2)[::-1], dim=-2)


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.int16).view(-1)[7] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model.layers.3.moe.experts.routed_experts.w13_weight", swap_halves),
        ("model.layers.3.moe.experts.routed_experts.w2_weight", lambda w: w.roll(1, 0)),
        ("model.layers.3.moe.shared_expert.gate_up_proj.weight", swap_halves),
        ("model.layers.1.mixer.qkv_proj.weight", lambda w: w.roll(128, 0)),
        ("model.layers.1.mixer.pass_gates", lambda w: w.flip(0)),
        ("model.layers.2.mixer.mamba.A", lambda w: -w),
        ("model.layers.2.mixer.mamba.conv1d.weight", lambda w: w.flip(-1)),
        ("model.layers.0.mixer.mamba.in_proj.weight", one_bit),
        ("model.depth_memory.route_weight", lambda w: w.roll(64, 1)),
        ("model.layers.4.moe_connection.mix", lambda w: w.transpose(1, 2)),
        ("model.layers.4.moe_connection.read", lambda w: w * float("nan")),
        ("model.depth_memory.entry_bias", lambda w: w.flip(0)),
        ("model.depth_memory.fold_weight", swap_halves),
        ("model.depth_memory.fold_bias", one_bit),
        ("model.depth_memory.logit_bias", lambda w: w + 1e-5),
    ],
)
def test_a_changed_tensor_is_found_and_named(faults_after, name, how):
    assert any(fault.startswith(f"{name}:") for fault in faults_after(name, how))


def test_a_pass_with_weights_of_its_own_is_found(folder, held, monkeypatch):
    mixer = held.model.layers[2].mixer
    first, second = mixer.passes
    second = copy.copy(second)
    second._parameters = first._parameters | {"A": nn.Parameter(first.A.clone())}
    monkeypatch.setattr(mixer, "passes", (first, second))
    faults = examine(held, StoredWeights(folder)).faults
    assert faults == ["model.layers.2.mixer: pass 1 does not use the weights of pass 0"]


def test_a_weight_that_is_held_twice_is_found(folder, held, monkeypatch):
    head = nn.Module()
    head.weight = nn.Parameter(held.lm_head.weight.clone())
    monkeypatch.setitem(held._modules, "lm_head", head)
    (fault,) = examine(held, StoredWeights(folder)).faults
    assert "`python -m vllm_metis plan` counts each once" in fault


def test_a_stored_tensor_that_stands_behind_nothing_is_found(folder, held, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file({"layers.0.moe.balance": torch.zeros(16)}, tmp_path / "more.safetensors")
    (fault,) = examine(held, StoredWeights(tmp_path)).faults
    assert fault.startswith("layers.0.moe.balance: in the checkpoint, but behind nothing")


def test_a_tensor_that_the_checkpoint_lacks_is_found(folder, held, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mixer.qkv.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (fault,) = examine(held, StoredWeights(tmp_path)).faults
    assert fault.startswith("model.layers.1.mixer.qkv_proj.weight: the checkpoint has no layers.1")


# Rounding on load happens on cards only: what vLLM would hold is made here.
QKV = "model.layers.1.mixer.qkv_proj.weight"


@pytest.fixture
def rounding(folder) -> Expectation:
    return Expectation(StoredWeights(folder), torch.bfloat16, quantizing=True)


def rounded(
    folder: Path, name: str = "layers.1.mixer.qkv.weight", steps: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as FP8 kernels take it, rounded but for some steps, and its scale."""
    weight = StoredWeights(folder)[name].float()
    scale = weight.abs().max().reshape(1) / torch.tensor([448.0])
    code = (weight / scale).to(FP8).view(torch.uint8)
    code = torch.where(code % 128 < 64, code + steps, code - steps)
    return code.view(FP8).t(), scale


def test_rounding_on_load_is_held_to_its_own_rounding_and_scale(folder, rounding):
    weight, scale = rounded(folder)
    found = rounding.compare(QKV, weight)
    assert found.fault is None
    assert found.rounded_on_load
    assert found.differing <= 0.0012 * found.values
    assert rounding.compare(f"{QKV}_scale", scale).differing == 0
    assert rounding.compare(f"{QKV}_scale", scale * 1.01).fault


def test_values_more_than_one_fp8_step_off_are_a_fault(folder, rounding):
    weight, _ = rounded(folder, steps=2)
    assert "up to 2 steps off" in rounding.compare(QKV, weight).fault


def test_too_many_values_one_fp8_step_off_are_a_difference(folder, rounding):
    weight, _ = rounded(folder, steps=1)
    found = rounding.compare(QKV, weight)
    assert found.fault is None
    assert found.differing == found.values
    assert "DIFFERENT" in table([found])


def test_a_few_values_one_fp8_step_off_pass():
    few = TensorComparison("w", "attention qkv", 10_000, 10_000, 12, None, True)
    many = TensorComparison("w", "attention qkv", 10_000, 10_000, 13, None, True)
    assert "one FP8 step off" in table([few])
    assert "DIFFERENT" in table([many])


def test_what_should_be_rounded_and_is_not_is_a_fault_and_so_is_the_reverse(folder, rounding):
    stored = StoredWeights(folder)
    assert "expected FP8" in rounding.compare(QKV, stored["layers.1.mixer.qkv.weight"]).fault
    kept = "model.layers.0.mixer.mamba.out_proj.weight"
    weight, _ = rounded(folder, "layers.0.mixer.impl.mixer.out_proj.weight")
    assert "FP8, where the checkpoint holds" in rounding.compare(kept, weight).fault


def test_fp8_steps_count_values_between():
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 448.0]).to(FP8)
    others = torch.tensor([-0.0, 0.0, 1.125, -1.25, -448.0]).to(FP8)
    assert fp8_steps(values, others).tolist() == [0, 0, 1, 2, 2 * 126]


def test_the_command_prints_a_table_and_ends_well(folder, capfd):
    assert main(["loaded_weights", str(folder)]) == 0
    printed = capfd.readouterr().out
    assert "routed experts" in printed
    assert "no difference" in printed


def test_a_fault_of_the_loader_is_named_and_fails_the_command(folder, capfd, monkeypatch):
    from vllm_metis.model.depth_memory import DepthMemory

    def without_reordering(self, parameter, loaded):
        parameter.data.copy_(loaded)

    monkeypatch.setattr(DepthMemory, "_load_route_weight", without_reordering)
    assert main(["loaded_weights", str(folder)]) == 1
    printed = capfd.readouterr().out
    assert "1 fault(s):" in printed
    assert "model.depth_memory.route_weight: " in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "set METIS_MODEL_DIR"),
        (["/nowhere"], "expected config.json and *.safetensors"),
        (["FOLDER", "--quantization", "fp8_per_tensor"], "not on a CPU"),
    ],
)
def test_what_cannot_be_compared_is_refused(folder, capfd, monkeypatch, arguments, expected):
    monkeypatch.delenv("METIS_MODEL_DIR", raising=False)
    arguments = [str(folder) if word == "FOLDER" else word for word in arguments]
    assert main(["loaded_weights", *arguments]) == 2
    assert expected in capfd.readouterr().err
