# SPDX-License-Identifier: Apache-2.0
"""Speed cells: the bytes that bound a step, what is measured of an engine, and how it is shown."""

from pathlib import Path

import pytest

from harness.checkpoints.twin import twin_configuration_only
from harness.checkpoints.write import config_of
from harness.evidence.engine import EngineFacts
from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.kinds.speed.child.step_bytes import distinct_experts, step_bytes
from harness.kinds.speed.observation import Kernel, SpeedObservation, SpeedRound
from harness.kinds.speed.twins import twins_table
from harness.matrices.expand import load_matrix
from harness.records import store as records
from harness.records.judge import judge
from harness.report import page as report
from tests import evidence
from tests.pages import Balanced, squeezed
from vllm_metis.cli.plan import PUBLISHED
from vllm_metis.config import Metis16Config

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[1]
LOGOS = Metis16Config(**PUBLISHED["logos"])

# Values of Logos's tensors by hand, from the table of docs/model.md. Widths: hidden 2560, Mamba 5120
# (convolution 7680, in_proj 12880), attention 2560 + 2 * 640, latent 1024, router 1024 + 256.
CONNECTIONS = 2 * (2560 + 4 + 4 + 16 + 24 * 64 + 24)
MAMBA = 12880 * 2560 + 7680 * 4 + 7680 + 5120 + 2560 * 5120
ATTENTION = 3840 * 2560 + 2560 * 2560 + 8 * 2560 + 3840 * 8 + 2
MOE = 2 * 1024 * 2560 + 192 * 256 + 1536 * 1024 + 1024 * 768
EXPERT = 1536 * 1024 + 1024 * 768
FP32_OF_MAMBA, FP32_OF_MOE = 3 * 80, 192 * (1280 + 2)
MEMORY = 3 * 256 * 2560 + 2 * 256 + 256 * 260 + 256 + 2 * (256 * 256 + 256) + 2560
MEMORY += 256 * (3 * 2560 + 256) + 256 + 2 * 256 + 4 * 256 + 4 * 2560 + 4
CONTINUATION = 256 * (3 * 2560 + 256) + 256 + 256 + 1
REST = 4 * 2560 + 2 * 64 + 2560 + 65536 * 2560  # streams, passes, final norm, head

LAYERS_BYTES = 2 * (20 * (CONNECTIONS + MOE) + 17 * MAMBA + 3 * ATTENTION) + 4 * (
    17 * FP32_OF_MAMBA + 20 * FP32_OF_MOE
)
ONCE_BYTES = 2 * (MEMORY + REST) + 4 * CONTINUATION


def test_one_stream_reads_the_layers_twice_and_four_experts_of_each():
    moved = step_bytes(LOGOS, "bf16", streams=1, new_tokens=1, context=1000)
    experts = 20 * 4 * EXPERT * 2
    assert moved.weights == ONCE_BYTES + 2 * (LAYERS_BYTES + experts) + 2560 * 2
    assert moved.weights == pytest.approx(5.1e9, rel=0.02)


def test_states_are_read_and_written_and_the_kv_cache_is_read():
    moved = step_bytes(LOGOS, "bf16", streams=3, new_tokens=1, context=999)
    assert moved.states == 3 * 2 * 34 * (2_621_440 + 46_080)
    assert moved.kv == 3 * 1000 * 15 * 1024
    assert moved.total == moved.weights + moved.kv + moved.states


def test_a_prefill_writes_states_that_it_need_not_read_and_meets_every_expert():
    moved = step_bytes(LOGOS, "bf16", streams=1, new_tokens=8192, context=0)
    assert moved.states == 34 * (2_621_440 + 46_080)
    assert moved.kv == 8192 * 15 * 1024
    experts = 20 * 192 * EXPERT * 2
    expected = ONCE_BYTES + 2 * (LAYERS_BYTES + experts) + 8192 * 2560 * 2
    assert moved.weights == pytest.approx(expected, rel=1e-9)


def test_fp8_halves_what_releases_quantize_and_adds_a_scale_a_row():
    bf16 = step_bytes(LOGOS, "bf16", streams=1, new_tokens=1, context=10)
    fp8 = step_bytes(LOGOS, "fp8", streams=1, new_tokens=1, context=10)
    mamba, attention = 12880 * 2560 - 4 * 12880, (3840 + 2560) * 2560 - 4 * (3840 + 2560)
    expert = EXPERT - 4 * (1536 + 1024)
    saved = 2 * (17 * mamba + 3 * attention + 20 * 4 * expert)
    assert bf16.weights - fp8.weights == saved


@pytest.mark.parametrize(("tokens", "expected"), [(1, 4.0), (2, 192 * (1 - (188 / 192) ** 2))])
def test_tokens_share_experts_where_routing_is_even(tokens, expected):
    assert distinct_experts(192, 4, tokens) == pytest.approx(expected)


def test_the_shipped_matrix_covers_shapes_dtypes_and_loads():
    cells = {cell.id for cell in load_matrix(REPOSITORY / "matrices/speed.yaml").cells}
    loads = ("stream1", "stream8", "stream32", "prefill8k")
    assert cells == {
        f"{shape}-{dtype}-{model}-{load}"
        for shape in ("logos", "praxis")
        for dtype in ("bf16", "fp8")
        for model in ("metis", "twin")
        for load in loads
    }


# Verdicts.


def settings(phase: str = "decode", **changes: object) -> dict:
    speed = {"phase": phase, "streams": 2, "prompt_tokens": 8, "max_tokens": 5, "rounds": 3}
    return {
        "checkpoint": {"shape": "tiny", "dtype": "bfloat16", "seed": 1},
        "engine": {"args": {"dtype": "bfloat16"}, "env": {}},
        "speed": speed | {"seed": 1, "profile": False} | changes,
        "timeout": {"start_s": 5, "cell_s": 5},
    }


def one_round(step_ms: float, **changes: object) -> SpeedRound:
    fields = {
        "first_token_ms": 50.0,
        "last_token_ms": 50.0 + 4 * step_ms,
        "steps": 5,
        "tokens": [5, 5],
        "last_token_ids": [8, 9],
    }
    return SpeedRound(**(fields | changes))


def observation(*rounds: SpeedRound, **changes: object) -> SpeedObservation:
    engine = EngineFacts(
        dtype="bfloat16",
        quantization=None,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        mamba_ssm_cache_dtype="float32",
        kv_cache_dtype="auto",
        enforce_eager=False,
        cudagraph_mode="FULL_AND_PIECEWISE",
        device="fake",
    )
    fields = {
        "settings": engine,
        "rounds": rounds or (one_round(3.0), one_round(2.0), one_round(9.0)),
        "prompt_tokens": 8,
        "startup_s": 30.0,
        "memory_bytes": 2**31,
        "copy_bytes_s": 4e12,
        "bytes_moved": 4_000_000_000,
        "distinct_experts": (7.5, 8.0),
        "kernels": [],
    }
    return SpeedObservation(**(fields | changes))


def record(observed: SpeedObservation, **changes: object) -> Record:
    fields = {"kind": "speed", "settings": settings(), "corpus": None, "reference": None}
    made = evidence.record(observation=observed, **(fields | changes))
    return made.model_copy(update={"verdict": judge(made)})


def figures(verdict: Verdict) -> dict[str, float]:
    return {finding.metric: finding.observed for finding in verdict.findings}


def test_decoding_is_the_median_step_beside_what_memory_allows():
    verdict = record(observation()).verdict
    assert verdict.verdict == "pass"
    assert figures(verdict) == pytest.approx(
        {
            "tpot_ms": 3.0,
            "decode_tok_s": 2000 / 3,
            "memory_limit_ms": 1.0,
            "mbu": 1 / 3,
            "memory_gib": 2.0,
            "startup_s": 30.0,
            "copy_tb_s": 4.0,
        }
    )


def test_prefill_is_the_median_time_to_the_first_token():
    rounds = [
        one_round(0.0, first_token_ms=ms, steps=1, tokens=[1], last_token_ids=[8])
        for ms in (4.0, 2.0, 3.0)
    ]
    prefill = settings("prefill", streams=1, max_tokens=1)
    found = figures(record(observation(*rounds), settings=prefill).verdict)
    assert found["ttft_ms"] == 3.0
    assert found["prefill_tok_s"] == pytest.approx(8000 / 3)
    assert found["mbu"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        (observation(distinct_experts=(4.0, 8.0)), "distinct experts of a layer and step"),
        (observation(one_round(3.0, steps=6), *[one_round(3.0)] * 2), "steps of a round"),
        (observation(one_round(3.0, tokens=[5, 4]), *[one_round(3.0)] * 2), "tokens generated"),
        (observation(one_round(3.0)), "rounds: expected 3, found 1"),
        (
            observation(settings=observation().settings.model_copy(update={"dtype": "float32"})),
            "dtype: expected bfloat16, found float32",
        ),
    ],
)
def test_what_does_not_measure_what_the_cell_names_is_not_reached(observed, reason):
    verdict = record(observed).verdict
    assert verdict.verdict == "not_reached"
    assert verdict.reasons[0].startswith(reason)
    assert verdict.findings == []


def test_a_twin_stands_beside_what_it_is_the_twin_of():
    ours = record(observation(), cell="a")
    fields = settings()
    fields["checkpoint"]["twin"] = True
    twin = record(observation(*[one_round(4.0)] * 3), settings=fields, cell="b")
    alone = record(
        observation(*[one_round(2.0)] * 3), settings=settings(seed=2, streams=2), cell="c"
    )
    longer = settings("prefill", prompt_tokens=9, streams=1, max_tokens=1)
    rounds = [one_round(0.0, first_token_ms=3.0, steps=1, tokens=[1], last_token_ids=[8])] * 3
    prefill = record(observation(*rounds, prompt_tokens=9), settings=longer, cell="d")
    table = twins_table([ours, twin, prefill])
    assert table.rows == [
        ["tiny, bfloat16: decode, 2 streams", "3", "1", "0.333", "4", "0.75"],
        ["tiny, bfloat16: prefill of 9 tokens", "3", "1", "0.333", "-", "-"],
    ]
    assert twins_table([twin]).rows == []
    assert twins_table([alone]).rows[0][-1] == "-"
    header = evidence.header("a", "b")
    lines = squeezed(report.markdown(header, [ours, twin], [], None)).splitlines()
    assert "| tiny, bfloat16: decode, 2 streams | 3 | 1 | 0.333 | 4 | 0.75 |" in lines
    page = report.html(header, [ours, twin], [], None)
    assert page.count("<h2>Beside the limit of memory, and the twin</h2>") == 1


@pytest.mark.parametrize("shape", ["logos", "praxis", "tiny"])
def test_the_twin_of_a_shape_has_its_matrices(shape, tmp_path):
    """vLLM reads its configuration, and what it holds is ours: a layer for each layer and pass."""
    from vllm import EngineArgs

    ours = Metis16Config(**config_of(shape))
    folder = twin_configuration_only(tmp_path, shape, "bfloat16")
    args = EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=1024)
    twin = args.create_model_config().hf_config
    layers = twin.layers_block_type
    passes = ours.num_passes
    assert layers.count("full_attention") == passes * len(ours.attention_layer_indices)
    assert layers.count("moe") == layers.count("linear_attention") + layers.count("full_attention")
    assert len(layers) == 2 * passes * ours.num_hidden_layers
    assert 2 * twin.moe_intermediate_size == 3 * ours.moe_intermediate_size
    widths = twin.mamba_num_heads * twin.mamba_head_dim, twin.n_groups * twin.ssm_state_size
    assert widths == (ours.mamba_d_inner, ours.mamba_n_groups * ours.mamba_d_state)


def test_reports_put_figures_side_by_side_and_fold_kernels():
    kernels = [
        Kernel(name="a<b|c>", calls=40.0, total_us=123.0),
        Kernel(name="at::native::" + "TensorIteratorBase&, " * 70, calls=2.0, total_us=4.0),
    ]
    slow = record(observation(kernels=kernels), cell="logos-bf16-stream1")
    parity = evidence.record()
    parity = parity.model_copy(update={"verdict": judge(parity)})
    found = [slow, parity]
    header = evidence.header(*(one.cell for one in found))
    text = report.markdown(header, found, [], None)
    lines = squeezed(text).splitlines()
    heads = next(line for line in lines if line.startswith("| cell | tpot, ms"))
    assert heads.count("|") == 9
    assert "| logos-bf16-stream1 | 3 | 667 | 1 | 0.333 | 2 | 30 | 4 |" in lines
    assert "<details><summary>logos-bf16-stream1: kernels of a decode step</summary>" in lines
    assert "| a<b\\|c> | 40 | 123 |" in lines
    assert max(map(len, lines)) < 200
    page = report.html(header, found, [], None)
    tags = Balanced()
    tags.feed(page)
    assert tags.open == []
    assert "<h2>Figures without a budget</h2>" in page
    assert "a&lt;b|c&gt;" in page
    assert page.count("Kernels of a decode step") == 1


# The whole way, on a CPU, with the tiny shape.

TINY = """\
schema_version: 1
kind: speed
question: How fast is the tiny shape here?
base:
  checkpoint: {shape: tiny, dtype: bfloat16, seed: 16}
  engine:
    args: {dtype: bfloat16, max_model_len: 1024, max_num_seqs: 8, max_num_batched_tokens: 1024,
      enable_prefix_caching: false}
    env: {}
  timeout: {start_s: 120, cell_s: 60}
axes:
  load:
    stream1:
      speed: {phase: decode, streams: 1, prompt_tokens: 8, max_tokens: 9, rounds: 2, seed: 1, profile: true}
    stream4:
      speed: {phase: decode, streams: 4, prompt_tokens: 8, max_tokens: 9, rounds: 2, seed: 4, profile: false}
    prefill300:
      speed: {phase: prefill, streams: 1, prompt_tokens: 300, max_tokens: 1, rounds: 2, seed: 3, profile: false}
"""


def test_an_engine_is_timed_on_a_cpu(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makeconftest('pytest_plugins = ["harness.run.plugin"]\n')
    (pytester.path / "tiny.yaml").write_text(TINY)
    result = pytester.runpytest_subprocess("tiny.yaml", "--results", "out")
    result.assert_outcomes(passed=3)
    _, found, _ = records.load_run(pytester.path / "out")
    decode, batch, prefill = (one.observation for one in found)
    assert judge(found[0]) == found[0].verdict
    assert decode.copy_bytes_s > 1e9
    assert decode.kernels[0].total_us >= decode.kernels[-1].total_us > 0
    assert any("mamba" in kernel.name for kernel in decode.kernels)
    assert batch.kernels == []
    assert batch.bytes_moved > decode.bytes_moved
    assert prefill.distinct_experts == (16.0, pytest.approx(16.0))
    shares = [figures(one.verdict)["mbu"] for one in found]
    assert all(0 < share < 1 for share in shares)
