# SPDX-License-Identifier: Apache-2.0
"""What vLLM's parameters hold after loading, and `python -m vllm_metis check`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.checkpoints.quantize import quantize_checkpoint
from harness.checkpoints.write import config_of
from tests.weights.meta import ALL_AT_ONCE
from vllm_metis.__main__ import main
from vllm_metis.checkpoint.audit import CheckpointError
from vllm_metis.checkpoint.specs import checkpoint_tensors
from vllm_metis.cli.check import INDEX, read_header
from vllm_metis.cli.plan import weights_bytes
from vllm_metis.config import Metis16Config


@pytest.fixture(scope="module", autouse=True)
def vllm_worker():
    """Set up what a vLLM worker has before it builds a model, on the CPU."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


def load(folder: Path, dtype: str = "float32") -> torch.nn.Module:
    """Load a checkpoint through vLLM's default loader, short of packing weights for the CPU."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=str(folder), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True
    )
    vllm_config = arguments.create_engine_config()
    vllm_config.model_config.maybe_untie_word_embeddings()
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(getattr(torch, dtype)):
        model = initialize_model(vllm_config)
        get_model_loader(vllm_config.load_config).load_weights(model, vllm_config.model_config)
        model.process_weights_after_loading()
    return model


@pytest.fixture(scope="module")
def loaded(checkpoint) -> torch.nn.Module:
    return load(checkpoint("tiny"))


def test_every_spelling_at_once_loads_the_same_parameters(checkpoint, loaded):
    respelled = dict(load(checkpoint("tiny", ALL_AT_ONCE)).named_parameters())
    for name, parameter in loaded.named_parameters():
        if name == "lm_head.weight" and name not in respelled:
            continue  # stored in one, tied in the other
        assert torch.equal(parameter, respelled[name]), name


def test_weights_are_held_once_for_both_passes(loaded):
    storages = [p.untyped_storage().data_ptr() for p in loaded.parameters()]
    assert len(set(storages)) == len(storages)
    mixer = loaded.model.layers[0].mixer
    first, second = mixer.passes
    assert first.in_proj is second.in_proj
    assert first.A is second.A
    assert first.conv_weights is second.conv_weights


def test_every_layer_and_pass_has_a_cache_of_its_own(loaded):
    context = loaded.vllm_config.compilation_config.static_forward_context
    caches = [name for name, layer in context.items() if hasattr(layer, "kv_cache")]
    config = loaded.config
    assert len(caches) == config.num_hidden_layers * config.num_passes
    mixers = [layer for layer in context.values() if hasattr(layer, "conv_ssm_forward")]
    assert len({id(mixer) for mixer in mixers}) == len(mixers)
    assert all(context[mixer.prefix] is mixer for mixer in mixers)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_rank_holds_of_the_parameters_what_their_specs_say(
    checkpoint, tmp_path, monkeypatch, dtype, tp
):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # vLLM ties two copies once it read them.
    folder = checkpoint("tiny", "lm_head=absent", dtype="bfloat16")
    if dtype == "fp8":
        quantize_checkpoint(folder, tmp_path / "fp8")
        folder = tmp_path / "fp8"
    vllm_config = EngineArgs(
        model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    monkeypatch.setattr(get_tp_group(), "world_size", tp)  # the first of so many, without the rest
    bfloat16, device = set_default_torch_dtype(torch.bfloat16), torch.device("meta")
    with set_current_vllm_config(vllm_config), bfloat16, device:
        model = initialize_model(vllm_config)
    held = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    config = Metis16Config(**json.loads((folder / "config.json").read_text()))
    planned = weights_bytes(config, dtype, tp)
    if dtype == "fp8":  # vLLM brings experts to BF16 on a CPU, so the others are compared
        held = {name: nbytes for name, nbytes in held.items() if ".experts." not in name}
        specs = checkpoint_tensors(config).items()
        planned -= sum(spec.nbytes(dtype, tp) for name, spec in specs if ".experts." in name)
    assert sum(held.values()) == planned


FLOAT32 = ("mamba.A", "mamba.D", "mamba.dt_bias", "expert_router", "selection_bias", "continuation")


def test_what_the_model_defines_in_float32_stays_float32_in_a_bfloat16_model(checkpoint):
    model = load(checkpoint("tiny"), "bfloat16")
    for name, parameter in model.named_parameters():
        expected = torch.float32 if any(part in name for part in FLOAT32) else torch.bfloat16
        assert parameter.dtype == expected, name
    for name, buffer in model.named_buffers():
        if name.endswith((".mix", ".read", ".write", ".gates", ".entry_bias")):
            assert buffer.dtype == torch.float32, name


def test_a_state_that_is_not_what_the_model_declares_is_told_in_words(checkpoint, monkeypatch):
    from vllm_metis.model.metis16 import Metis16ForCausalLM

    declared = classmethod(lambda cls, vllm_config: (torch.float32, torch.bfloat16))
    monkeypatch.setattr(Metis16ForCausalLM, "get_mamba_state_dtype_from_config", declared)
    found = (
        r"in \(torch.float32, torch.bfloat16\), but model.layers.0.mixer.mamba keeps .*float32\)"
    )
    with pytest.raises(ValueError, match=found):
        load(checkpoint("tiny"))


def test_constants_of_weights_alone_are_computed_for_every_pass(loaded):
    connection = loaded.model.layers[2].moe_connection
    passes = loaded.config.num_passes
    torch.testing.assert_close(connection.mix.sum(-2), torch.ones(passes, 4))
    torch.testing.assert_close(connection.read.sum(-1), torch.ones(passes))
    torch.testing.assert_close(connection.write.sum(-1), torch.ones(passes))
    assert not torch.equal(connection.mix[0], connection.mix[1])
    for name, buffer in loaded.named_buffers():
        assert not buffer.isnan().any(), name


def test_a_checkpoint_with_a_fault_stops_the_load_with_all_of_them(checkpoint, tmp_path):
    folder = tmp_path / "faulty"
    shutil.copytree(checkpoint("tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.3.moe.local_experts.7.down.weight"]
    tensors["layers.0.moe.balance"] = torch.zeros(16)
    tensors["layers.0.mixer.impl.mixer.A_log"] = tensors["layers.0.mixer.impl.mixer.A_log"].half()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert "4 fault(s)" in message  # the rejected A_log is unset too
    assert "layers.0.moe.balance: not a tensor of this model" in message
    assert "experts.7.down_proj.weight: missing" in message
    assert "layers.0.mixer.impl.mixer.A_log: float16, where the model has float32" in message


@pytest.fixture
def check(capsys) -> Callable[[Path], tuple[int, str]]:
    """Return a function that runs `check` here; it returns the exit code and what was printed."""

    def run(folder: Path) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["check", str(folder)])
        return code, capsys.readouterr().out

    return run


RELEASE = os.environ.get("METIS_MODEL_DIR")


@pytest.mark.parametrize("release", [RELEASE] if RELEASE else [])
def test_check_accepts_the_release(check, release):
    code, printed = check(Path(release))
    assert code == 0, printed


def test_check_accepts_a_sound_checkpoint_and_describes_it(checkpoint):
    command = [sys.executable, "-m", "vllm_metis", "check", str(checkpoint("tiny16"))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 layers x 2 passes" in done.stdout
    assert "unused by name" in done.stdout
    assert "Would load" in done.stdout


def test_check_lists_every_fault_of_a_config(check, checkpoint, tmp_path):
    folder = tmp_path / "faulty"
    shutil.copytree(checkpoint("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["latent_dim"], config["num_passes"]
    (folder / "config.json").write_text(json.dumps(config))
    code, printed = check(folder)
    assert code == 1
    assert "moe_latent_size: missing; looked for the keys moe_latent_size, latent_dim" in printed
    assert "num_passes: missing" in printed


def test_check_names_a_shard_that_the_index_lists_and_the_folder_lacks(check, checkpoint, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(checkpoint("tiny", shard_bytes=2**20), folder)
    shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    (folder / shards[2]).unlink()
    code, printed = check(folder)
    assert code == 1
    assert f"{shards[2]}: named by {INDEX} and not in the folder" in printed
    assert "missing, so it would be unset" in printed


def test_check_names_a_file_that_is_cut_short(check, checkpoint, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(checkpoint("tiny"), folder)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)
    code, printed = check(folder)
    assert code == 1
    assert f"model.safetensors: expected {size} bytes by its header, found {size - 100}" in printed


def safetensors(path: Path, entries: dict[str, object], size: int) -> Path:
    """Write a header and a sparse rest of `size` bytes."""
    raw = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + size)
    return path


def test_of_a_file_the_header_alone_is_read(tmp_path):
    """A terabyte of weights, more than any machine reads or reserves in the time of a test."""
    size = 2**40
    entry = {"dtype": "F8_E4M3", "shape": [2**20, 2**20], "data_offsets": [0, size]}
    path = safetensors(tmp_path / "large.safetensors", {"weight": entry}, size)
    (tensor,) = read_header(path).values()
    assert (tensor.device.type, tensor.nbytes) == ("meta", size)


SOUND = {"weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}


@pytest.mark.parametrize("size", [0, 5, 11])
def test_a_file_that_is_cut_short_is_to_be_downloaded_again(tmp_path, size):
    path = safetensors(tmp_path / "cut.safetensors", SOUND, size)
    whole = path.stat().st_size + 12 - size
    with pytest.raises(ValueError, match=f"cut.safetensors: expected {whole} bytes") as error:
        read_header(path)
    assert str(error.value).endswith("the file is cut short, download it again")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"<!DOCTYPE html><html>Not found</html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 20800000000\n",
        (200).to_bytes(8, "little") + b'{"weight": {"dtype": "BF16", "sha',
        (4).to_bytes(8, "little") + b"\x80\x04\x95.",
    ],
    ids=["empty", "short", "a web page", "an LFS pointer", "cut in its header", "a pickle"],
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path, content):
    path = tmp_path / "junk.safetensors"
    path.write_bytes(content)
    message = "junk.safetensors: expected a safetensors file, found no readable header"
    with pytest.raises(ValueError, match=message) as error:
        read_header(path)
    assert "download it again" in str(error.value)


def test_a_dtype_that_no_model_has_is_named(tmp_path):
    entry = {"dtype": "F4", "shape": [2, 12], "data_offsets": [0, 12]}
    path = safetensors(tmp_path / "odd.safetensors", {"weight": entry}, 12)
    with pytest.raises(ValueError, match=r"odd.safetensors: unknown dtypes F4"):
        read_header(path)


def test_check_reads_a_checkpoint_of_full_size_from_its_headers(check, checkpoint, tmp_path):
    """20 GB of weights that take no disk: the file is sparse past its header."""
    folder = tmp_path / "logos"
    shutil.copytree(checkpoint("tiny"), folder)
    values = json.loads((folder / "config.json").read_text()) | config_of("logos")
    (folder / "config.json").write_text(json.dumps(values))
    header, offset = {}, 0
    for name, tensor in checkpoint_tensors(Metis16Config(**values)).items():
        end = offset + torch.Size(tensor.shape).numel() * (4 if tensor.fp32 else 2)
        name = name.replace(".A", ".A_log").replace(
            "depth_memory.route_", "depth_memory.route_projection."
        )
        header[name] = {
            "dtype": "F32" if tensor.fp32 else "BF16",
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    code, printed = check(folder)
    assert code == 0, printed
    # docs/model.md: a BF16 file of 20.80 GB, unused heads included.
    assert offset == pytest.approx(20.8e9, rel=1e-3)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "no config.json in"),
        ({"config.json": "{"}, "config.json: not JSON"),
        ({"config.json": '{"model_type": "llama"}'}, "model_type 'llama', expected 'metis16'"),
    ],
)
def test_check_names_what_is_not_a_checkpoint(check, tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, printed = check(tmp_path)
    assert code == 1
    assert expected in printed
