# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_metis plan`: its figures are those of the files, of docs/model.md and of the engine."""

import re
import subprocess
import sys

import pytest

from harness.checkpoints.shapes import SHAPES
from harness.checkpoints.write import config_of
from tests.engines import engine
from vllm_metis.__main__ import main
from vllm_metis.cli.plan import PUBLISHED, cache_layers, plan, weights_bytes
from vllm_metis.config import FIELDS, Metis16Config


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_geometry_is_that_of_the_checkpoints_written_here(name):
    published = Metis16Config(**PUBLISHED[name])
    written = Metis16Config(**config_of(name))
    for field in FIELDS:
        assert getattr(published, field.name) == getattr(written, field.name), field.name


# docs/model.md: sizes of the files, which hold a second copy of the embedding and unused heads.
@pytest.mark.parametrize(
    ("name", "dtype", "file_bytes"),
    [
        ("logos", "bf16", 20.80e9),
        ("logos", "fp8", 11.17e9),
        ("praxis", "bf16", 6.16e9),
        ("praxis", "fp8", 3.53e9),
    ],
)
def test_weights_are_those_of_the_published_files(name, dtype, file_bytes):
    config = Metis16Config(**PUBLISHED[name])
    head = config.vocab_size * config.hidden_size * 2
    assert weights_bytes(config, dtype, tp=1) + head == pytest.approx(file_bytes, rel=2e-3)


def test_caches_of_the_published_models_are_those_of_the_model_page():
    found = plan(Metis16Config(**PUBLISHED["logos"]), 80 * 2**30, 8192)
    assert found.kv_bytes_per_token == 15 * 1024
    assert found.state_bytes == 34 * (2_621_440 + 46_080)
    assert found.block_size == 1056
    found = plan(Metis16Config(**PUBLISHED["praxis"]), 80 * 2**30, 8192)
    assert found.kv_bytes_per_token == 8 * 1024
    assert found.state_bytes == 20 * (2_097_152 + 36_864)


def test_a_float8_cache_doubles_the_block_and_a_bfloat16_state_halves_it():
    config = Metis16Config(**PUBLISHED["logos"])
    assert plan(config, 80 * 2**30, 8192, kv_dtype_bytes=1).block_size == 2096
    assert plan(config, 80 * 2**30, 8192, ssm_dtype_bytes=2).block_size == 544


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("tp", [2, 8, 10])
def test_ranks_share_what_is_split_and_repeat_the_rest(name, tp):
    config = Metis16Config(**PUBLISHED[name])
    one, many = weights_bytes(config, "bf16", 1), weights_bytes(config, "bf16", tp)
    assert one / tp < many < one / tp + 0.1 * one


@pytest.mark.parametrize("shape", ["tiny", "tiny16"])
def test_the_engine_comes_to_the_same_figures(checkpoint, tmp_path, shape):
    pool = 2**27
    with engine(
        checkpoint(shape),
        tmp_path,
        {"VLLM_LOGGING_LEVEL": "INFO"},  # the log is read
        dtype="bfloat16",
        enable_prefix_caching=True,
        kv_cache_memory_bytes=pool,
    ) as served:
        facts = served.facts
    log = (tmp_path / "engine.log").read_text()
    logged = float(
        re.search(r"Maximum concurrency for 4,096 tokens per request: ([\d.]+)x", log)[1]
    )
    config = Metis16Config(**config_of(shape))
    weights = weights_bytes(config, "bf16", 1)
    found = plan(config, pool + weights, 4096, alignment=128)
    assert found.block_size == facts["block_size"]
    assert found.num_blocks == facts["num_gpu_blocks"]
    assert found.max_concurrency == pytest.approx(logged, abs=0.01)
    assert sum(cache_layers(config)) == config.num_hidden_layers * config.num_passes


def test_the_report_ends_with_a_command_that_serves(capsys):
    arguments = ["plan", "--model", "praxis", "--gpu-memory", "16", "--max-model-len", "8192"]
    assert main(arguments) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("vllm serve Lernex/Metis-1.6-Praxis --max-model-len 8192")
    assert "--reasoning-parser metis --enable-auto-tool-choice --tool-call-parser metis" in line


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--model", "logos"], 1, "Does not fit"),
        (["--model", "logos", "--dtype", "fp8"], 0, "vllm serve"),
        (["--model", "logos", "--tp", "4"], 2, "sizes that do: 1, 2, 5, 10"),
        (["--model", "nowhere"], 2, "expected a folder with config.json, or logos, praxis"),
    ],
)
def test_what_does_not_fit_or_divide_is_said(capsys, arguments, code, expected):
    assert main(["plan", *arguments, "--gpu-memory", "16", "--max-model-len", "8192"]) == code
    assert expected in capsys.readouterr().out


def test_planning_needs_neither_torch_nor_vllm():
    code = (
        "import sys; from vllm_metis.cli.plan import plan, read_config\n"
        "plan(read_config('logos')[1], 2**35, 8192)\n"
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_every_shape_that_is_published_can_be_written():
    assert set(PUBLISHED) <= set(SHAPES)
