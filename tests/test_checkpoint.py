# SPDX-License-Identifier: Apache-2.0
"""Written checkpoints: the release's layout, every spelling of it, and their safety on disk."""

import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness.checkpoints import layout
from harness.checkpoints import write as checkpoint
from harness.checkpoints.spelling import AXES, Spelling, SpellingError
from harness.checkpoints.tokenizer import read_tokenizer
from harness.checkpoints.write import UnwritableError, config_of, write_checkpoint
from harness.reference.configuration_metis16 import Metis16Config
from harness.reference.modeling_metis16 import load_reference
from tests.micro import MICRO

GOLDEN = Path(__file__).parent / "golden"
FP32_ALWAYS = re.compile(
    r"^continuation\.|^depth_budget\.|\.(A_log|D|dt_bias|selection_bias)$"
    r"|\.(expert_router|k_router|k_budget)\."
)


@pytest.fixture(autouse=True)
def micro(monkeypatch):
    monkeypatch.setitem(checkpoint.SHAPES, "micro", MICRO)


@pytest.fixture
def write(tmp_path):
    def write_and_read(spelling="", name="checkpoint", **arguments):
        parsed = Spelling.parse(spelling)
        folder = write_checkpoint(tmp_path / name, "micro", spelling=parsed, **arguments)
        return load_file(folder / "model.safetensors")

    return write_and_read


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def implied_tensors(values):
    config = Metis16Config(**values)
    return {
        tensor.name: tensor
        for tensor in checkpoint._stored_tensors(config, torch.bfloat16, lambda spec: None)
    }


@pytest.mark.parametrize("shape", ["tiny", "tiny16"])
def test_the_layout_is_that_of_the_training_runtime(shape):
    implied = implied_tensors(read_config(GOLDEN / shape))
    names = {"F32": torch.float32, "BF16": torch.bfloat16}
    with safe_open(GOLDEN / shape / "model.safetensors", "pt") as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        expected = {
            name: (tuple(one.get_shape()), names[one.get_dtype()]) for name, one in slices.items()
        }
    assert {name: (one.shape, one.dtype) for name, one in implied.items()} == expected


@pytest.mark.parametrize(("shape", "gigabytes"), [("logos", 20.80), ("praxis", 6.16)])
def test_the_released_shapes_have_the_released_sizes(shape, gigabytes):
    total = sum(tensor.nbytes for tensor in implied_tensors(config_of(shape)).values())
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_tiny16_has_widths_that_128_does_not_divide():
    config = Metis16Config(**config_of("tiny16"))
    widths = [
        config.d_inner + config.conv_dim + config.mamba_heads,
        config.latent_dim,
        config.latent_dim + config.route_feature_dim,
        config.expert_intermediate_dim,
    ]
    assert [width % 16 for width in widths] == [0] * 4
    assert all(width % 128 for width in widths)


def test_the_same_seed_gives_the_same_tensors_and_another_seed_others(write):
    first = write(name="first", seed=3)
    again = write(name="again", seed=3)
    other = write(name="other", seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    zero = {"depth_budget.multiplier", *(f"layers.{i}.moe.k_budget.multiplier" for i in (0, 1))}
    assert {name for name in first if torch.equal(first[name], other[name])} == zero


def test_a_processor_with_other_instructions_writes_the_same_weights(tmp_path):
    here = write_checkpoint(tmp_path / "here", "tiny16", seed=1)
    command = [sys.executable, "-m", "harness", "checkpoint", str(tmp_path / "there")]
    subprocess.run(
        [*command, "--shape", "tiny16", "--seed", "1"],
        check=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"},
    )
    there = tmp_path / "there" / "model.safetensors"
    assert there.read_bytes() == (here / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp32_tensors_stay_fp32_and_the_rest_has_the_dtype_asked_for(write, dtype):
    for name, tensor in write(dtype=dtype).items():
        expected = torch.float32 if FP32_ALWAYS.search(name) else getattr(torch, dtype)
        assert tensor.dtype is expected, name


def test_both_dtypes_hold_the_same_model(write):
    wide, narrow = write(name="wide"), write(name="narrow", dtype="bfloat16")
    assert all(torch.equal(tensor, narrow[name].float()) for name, tensor in wide.items())


MIXER = "layers.0.mixer.impl.mixer."
EXPERTS = "layers.0.moe.local_experts."


def renamed(old, new):
    return lambda plain: {name.replace(old, new): tensor for name, tensor in plain.items()}


def with_prefix(plain):
    return {name if name == "lm_head.weight" else f"model.{name}": plain[name] for name in plain}


def stacked(plain):
    result = {name: tensor for name, tensor in plain.items() if "local_experts" not in name}
    for layer in (0, 1):
        for part in ("gate_up.weight", "down.weight"):
            at = f"layers.{layer}.moe.local_experts"
            result[f"{at}.{part}"] = torch.stack([plain[f"{at}.{e}.{part}"] for e in range(5)])
    return result


def split_rows(suffix, parts):
    def split(plain):
        result = {}
        for name, tensor in plain.items():
            if not name.endswith(suffix):
                result[name] = tensor
                continue
            pieces = tensor.split(list(parts.values()))
            names = (name.replace(suffix, f".{part}.weight") for part in parts)
            result |= dict(zip(names, pieces, strict=True))
        return result

    return split


def two_pass_rows(plain):
    tables = ("pass_embeddings", "depth_memory.pass_embeddings", "layers.1.mixer.pass_gates")
    return plain | {name: plain[name][:2] for name in tables}


def without_middle_axis(plain):
    name = f"{MIXER}conv1d.weight"
    return plain | {name: plain[name].squeeze(1)}


SPELLED = {
    "prefix=model": with_prefix,
    "mamba=mixer.impl": renamed(".mixer.impl.mixer.", ".mixer.impl."),
    "mamba=mixer": renamed(".mixer.impl.mixer.", ".mixer."),
    "experts=experts": renamed(".local_experts.", ".experts."),
    "expert_layout=stacked": stacked,
    "gate_up=apart": split_rows(".gate_up.weight", {"gate_proj": 28, "up_proj": 28}),
    "qkv=apart": split_rows(".qkv.weight", {"q_proj": 64, "k_proj": 32, "v_proj": 32}),
    "pass_rows=used": two_pass_rows,
    "conv1d=two_axes": without_middle_axis,
    "lm_head=absent": lambda plain: {k: v for k, v in plain.items() if k != "lm_head.weight"},
}


def assert_same_tensors(observed, expected):
    assert observed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(observed[name], tensor), name


@pytest.mark.parametrize("spelling", SPELLED)
def test_a_spelling_renames_and_reshapes_the_same_weights(write, spelling):
    assert_same_tensors(write(spelling, "spelled"), SPELLED[spelling](write(name="plain")))


def test_all_spellings_combine(write):
    plain = write(name="plain")
    spelled = write(
        "prefix=model,mamba=mixer,experts=experts,expert_layout=stacked,gate_up=apart,qkv=apart,"
        "pass_rows=used,conv1d=two_axes,lm_head=absent",
        "spelled",
    )
    gates = [plain[f"{EXPERTS}{e}.gate_up.weight"][:28] for e in range(5)]
    assert torch.equal(spelled["model.layers.0.moe.experts.gate_proj.weight"], torch.stack(gates))
    assert spelled["model.layers.0.mixer.conv1d.weight"].shape == (224, 4)
    assert spelled["model.layers.1.mixer.k_proj.weight"].shape == (32, 64)
    assert spelled["model.layers.1.mixer.pass_gates"].shape == (2,)
    assert "model.layers.0.moe.shared_expert.up_proj.weight" in spelled
    assert not [name for name in spelled if re.search(r"lm_head|local_experts|impl|gate_up", name)]


def test_every_value_of_every_axis_but_the_keys_is_compared():
    compared = {f"{axis}={value}" for axis, values in AXES.items() for value in values[1:]}
    assert compared == set(SPELLED) | {"config=transformers", "config=manifest"}


@pytest.mark.parametrize(
    ("spelling", "key"), [("transformers", "moe_latent_size"), ("manifest", "d_model")]
)
def test_the_configuration_is_the_same_under_other_keys(write, tmp_path, spelling, key):
    write()
    write(f"config={spelling}", "spelled")
    plain, spelled = read_config(tmp_path / "checkpoint"), read_config(tmp_path / "spelled")
    assert key in spelled
    assert key not in plain
    assert Metis16Config(**spelled).to_dict() == Metis16Config(**plain).to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=red", "unknown spelling: colour; the axes are prefix, mamba,"),
        ("qkv=stacked,prefix=x", "qkv=stacked: allowed are fused, apart"),
        ("qkv=stacked,prefix=x", "prefix=x: allowed are none, model"),
        ("qkv=apart,qkv=fused", "one axis twice"),
    ],
)
def test_an_unknown_spelling_is_refused_with_those_that_exist(text, message):
    with pytest.raises(SpellingError, match=re.escape(message)):
        Spelling.parse(text)


def test_an_unknown_shape_is_refused_with_those_that_exist():
    with pytest.raises(UnwritableError, match=r"allowed are tiny, tiny16, logos, praxis"):
        config_of("huge")


def test_shards_are_indexed_and_hold_every_tensor_once(write, tmp_path):
    plain = write()
    largest = max(tensor.nbytes for tensor in plain.values())
    folder = write_checkpoint(tmp_path / "sharded", "micro", shard_bytes=largest)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    read = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(folder / name)
        assert sum(tensor.nbytes for tensor in shard.values()) <= largest
        assert not shard.keys() & read.keys()
        assert {index["weight_map"][tensor] for tensor in shard} == {name}
        read |= shard
    assert_same_tensors(read, plain)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in plain.values())


def test_no_more_than_a_shard_is_held_in_memory(tmp_path, monkeypatch):
    held = {"now": 0, "most": 0}

    def release(nbytes):
        held["now"] -= nbytes

    def counted_draw(spec, seed, draw=layout.draw):
        tensor = draw(spec, seed)
        held["now"] += tensor.nbytes
        held["most"] = max(held.values())
        weakref.finalize(tensor, release, tensor.nbytes)
        return tensor

    monkeypatch.setattr(checkpoint, "draw", counted_draw)
    shard_bytes = 200_000
    folder = write_checkpoint(tmp_path / "sharded", "micro", shard_bytes=shard_bytes)
    sizes = [path.stat().st_size for path in folder.glob("model-*.safetensors")]
    assert len(sizes) > 3
    assert held["most"] <= shard_bytes < sum(sizes) / 2


def test_a_folder_with_files_is_replaced_only_when_asked(write, tmp_path):
    write(seed=1)
    (tmp_path / "checkpoint/note.txt").write_text("mine")
    with pytest.raises(UnwritableError, match="is not empty; pass --overwrite"):
        write(seed=2)
    assert (tmp_path / "checkpoint/note.txt").exists()
    write(seed=2, overwrite=True)
    assert not (tmp_path / "checkpoint/note.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_failed_write_leaves_what_was_there(write, tmp_path, monkeypatch):
    before = write(seed=1)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "_write_companions", fail)
    with pytest.raises(OSError, match="no space left"):
        write(seed=2, overwrite=True)
    assert_same_tensors(load_file(tmp_path / "checkpoint/model.safetensors"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_folder_is_complete(write, tmp_path):
    write(dtype="bfloat16")
    folder = tmp_path / "checkpoint"
    config = read_config(folder)
    assert config["model_type"] == "metis16"
    assert config["architectures"] == ["Metis16ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"], generation["top_k"]) == (0.6, 0.95, 20)
    assert generation["eos_token_id"] == [0, 4]
    assert len(read_tokenizer(folder)) == MICRO["vocab_size"]


def test_remote_code_loads_and_generates(write, tmp_path, monkeypatch):
    write()
    folder = tmp_path / "checkpoint"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    assert type(model).__module__.startswith("transformers_modules")
    assert model.generation_config.eos_token_id == [0, 4]
    ids = torch.arange(7, 27)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, load_reference(folder)(ids).logits)
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, **arguments)
    assert cached.shape == (1, 28)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments))


@pytest.mark.parametrize("shape", ["tiny", "tiny16"])
def test_random_weights_are_well_conditioned_and_reach_every_path(tmp_path, shape):
    model = load_reference(write_checkpoint(tmp_path / "checkpoint", shape))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, model.config.vocab_size, (1, 200), generator=generator)
    with torch.inference_mode():
        output = model(ids, output_trace=True)
    assert 1.7 < output.logits.std() < 2.3
    assert output.streams.abs().max() < 20
    assert output.logits.argmax(-1).unique().numel() > 50
    clamped = torch.logit(output.continuation).abs() > 3.99
    assert 0.1 < clamped.float().mean() < 0.6


def test_the_command_writes_and_refuses(tmp_path, capsys):
    arguments = SimpleNamespace(
        out=tmp_path / "checkpoint",
        shape="micro",
        dtype="float32",
        seed=0,
        spelling="qkv=apart",
        taught=False,
        overwrite=False,
        cache=None,
    )
    assert checkpoint.run(arguments) == 0
    assert checkpoint.run(arguments) == 2
    assert "pass --overwrite" in capsys.readouterr().err
