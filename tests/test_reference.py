# SPDX-License-Identifier: Apache-2.0
"""The reference against the golden vectors, against itself, and on bad input."""

import ast
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.reference import configuration_metis16, sublayers_metis16
from harness.reference import modeling_metis16 as reference
from harness.reference.configuration_metis16 import Metis16Config
from harness.reference.modeling_metis16 import load_reference
from harness.reference.sublayers_metis16 import (
    QuantizableLinear,
    causal_attention,
    fp8_round,
    ssd_scan,
)
from harness.scoring import golden

GOLDEN = Path(__file__).parent / "golden"
# Of the largest value: a right implementation gives 5e-6, the mildest known fault 1e-3.
RELATIVE_LIMIT = 1e-5
FP32_ALWAYS = (
    "A_log",
    "dt_bias",
    "D",
    "selection_bias",
    "expert_router.weight",
    "expert_router.bias",
)

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["tiny", "tiny16"])
def vectors(request):
    folder = GOLDEN / request.param
    return SimpleNamespace(
        folder=folder,
        model=load_reference(folder),
        expected=load_file(folder / "expected.safetensors"),
    )


def prompt(vectors, name):
    return vectors.expected[f"{name}.input_ids"].long()[None]


def assert_close_to_largest(observed, expected):
    error = (observed - expected).abs().max() / expected.abs().max()
    assert error < RELATIVE_LIMIT, f"{error:.1e} of the largest value"


@pytest.mark.parametrize("name", ["prompt0", "prompt1"])
def test_every_golden_output_is_met(vectors, name):
    output = vectors.model(prompt(vectors, name), output_trace=True)
    expected = vectors.expected
    logits_error = (output.logits[0] - expected[f"{name}.logits"]).abs().max()
    assert logits_error < golden.LOGIT_LIMIT
    assert_close_to_largest(output.final_hidden[0], expected[f"{name}.final_hidden"])
    # A sharp head: a right implementation gives 2e-5 on its probabilities, a wrong one 1e-2.
    continuation_error = (output.continuation[:, 0] - expected[f"{name}.continuation"]).abs().max()
    assert continuation_error < 1e-4


def test_the_streams_after_every_block_are_met(vectors):
    output = vectors.model(prompt(vectors, "prompt0"), output_trace=True)
    for block, streams in enumerate(vectors.expected["prompt0.streams"]):
        assert_close_to_largest(output.streams[block, 0], streams)


def test_the_limit_catches_the_mildest_known_fault(vectors):
    config = Metis16Config(**json.loads((vectors.folder / "config.json").read_text()))
    config.rms_norm_eps, config.mamba_norm_eps = config.mamba_norm_eps, config.rms_norm_eps
    swapped = reference.Metis16ForCausalLM(config)
    swapped.load_state_dict(vectors.model.state_dict())
    logits = swapped(prompt(vectors, "prompt1")).logits[0]
    assert (logits - vectors.expected["prompt1.logits"]).abs().max() > 10 * golden.LOGIT_LIMIT


@pytest.mark.parametrize("sizes", [[1] * 24, [5, 1, 18]])
def test_decoding_with_the_cache_equals_one_forward(vectors, sizes):
    cache, logits = None, []
    for piece in prompt(vectors, "prompt0").split(sizes, dim=1):
        output = vectors.model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0])
    assert cache.get_seq_length() == 24
    error = (torch.cat(logits) - vectors.expected["prompt0.logits"]).abs().max()
    assert error < golden.LOGIT_LIMIT


def test_prefill_in_chunks_equals_one_forward(vectors):
    cache, logits = None, []
    for piece in prompt(vectors, "prompt1").split(37, dim=1):
        output = vectors.model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0])
    error = (torch.cat(logits) - vectors.expected["prompt1.logits"]).abs().max()
    assert error < golden.LOGIT_LIMIT


@pytest.mark.parametrize("earlier", [0, 5])
@pytest.mark.parametrize("block", [1, 7, 23, 100])
def test_attention_takes_queries_in_blocks_and_none_sees_a_later_key(block, earlier):
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, 23, 8, generator=draw)
    k, v = torch.randn(2, 2, 2, 23 + earlier, 8, generator=draw)
    keys, values = (t.repeat_interleave(3, dim=1) for t in (k, v))
    scores = q @ keys.transpose(-1, -2) / 8**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(earlier + 1)
    expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(causal_attention(q, k, v, block), expected)


def test_greedy_generation_is_the_same_with_and_without_cache(vectors):
    ids = prompt(vectors, "prompt0")
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    cached = vectors.model.generate(ids, use_cache=True, **arguments)
    assert cached.shape == (1, 36)
    assert torch.equal(cached, vectors.model.generate(ids, use_cache=False, **arguments))


def test_a_batch_equals_its_sequences_alone(vectors):
    ids = prompt(vectors, "prompt1")[:, :96].view(3, 32)
    together = vectors.model(ids).logits
    for row, alone in zip(together, ids, strict=True):
        assert (row - vectors.model(alone[None]).logits[0]).abs().max() < golden.LOGIT_LIMIT


def test_padding_is_refused(vectors):
    ids = prompt(vectors, "prompt0")
    mask = torch.ones_like(ids)
    vectors.model(ids, attention_mask=mask)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask has zeros"):
        vectors.model(ids, attention_mask=mask)


def test_only_the_logits_asked_for_are_computed(vectors):
    ids = prompt(vectors, "prompt0")
    every = vectors.model(ids).logits
    assert torch.allclose(vectors.model(ids, logits_to_keep=2).logits, every[:, -2:], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_chunked_scan_is_the_recurrence(chunk):
    torch.manual_seed(0)
    x, dt = torch.randn(2, 50, 4, 8), torch.rand(2, 50, 4)
    A, B, C = -torch.rand(4) * 4, torch.randn(2, 50, 4, 16), torch.randn(2, 50, 4, 16)
    start = torch.randn(2, 4, 8, 16)

    state, expected = start, []
    for t in range(50):
        decay = (dt[:, t] * A).exp()[..., None, None]
        step = dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None, :]
        state = decay * state + step
        expected.append((state * C[:, t, :, None, :]).sum(-1))
    expected = torch.stack(expected, dim=1)

    y, last = ssd_scan(x, dt, A, B, C, start, chunk)
    assert_close_to_largest(y, expected)
    assert_close_to_largest(last, state)


def test_bf16_keeps_in_fp32_what_the_model_defines_so(vectors):
    model = load_reference(vectors.folder, torch.bfloat16)
    for name, parameter in model.named_parameters():
        fp32 = name.startswith("continuation.") or name.endswith(FP32_ALWAYS)
        assert parameter.dtype is (torch.float32 if fp32 else torch.bfloat16), name


def test_bf16_is_near_fp32(vectors):
    ids = prompt(vectors, "prompt1")
    served = load_reference(vectors.folder, torch.bfloat16)(ids).logits.log_softmax(-1)
    error = (served - vectors.model(ids).logits.log_softmax(-1)).abs().mean()
    assert 1e-4 < error < 0.1  # rounding gives 0.03; another model 2


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_simulated_fp8_rounds_the_quantized_linears_and_can_be_undone(vectors, scale):
    ids = prompt(vectors, "prompt0")
    plain = vectors.model(ids).logits
    quantized = {n for n, m in vectors.model.named_modules() if isinstance(m, QuantizableLinear)}
    kinds = {"in_proj", "qkv", "mixer.out", "gate_up", "down"}
    assert {kind for kind in kinds for name in quantized if name.endswith(kind)} == kinds
    assert not [name for name in quantized if "shared_expert" in name or "latent" in name]

    vectors.model.simulate_fp8(scale)
    rounded = vectors.model(ids).logits
    vectors.model.simulate_fp8(None)
    error = (rounded.log_softmax(-1) - plain.log_softmax(-1)).abs().mean()
    assert 1e-2 < error < 0.6  # rounding gives 0.15 to 0.25; another model 2
    assert torch.equal(vectors.model(ids).logits, plain)


def test_fp8_rounding_keeps_three_bits_and_each_rows_largest_value():
    x = torch.randn(8, 256) * torch.logspace(-3, 3, 8)[:, None]
    rounded = fp8_round(x)
    largest = x.abs().amax(-1)
    assert torch.allclose(rounded.abs().amax(-1), largest, rtol=1e-6)
    normal = x.abs() > largest[:, None] / 448 * 2**-6
    error = (rounded - x).abs() / x.abs()
    assert error[normal].max() <= 2**-4
    assert torch.allclose(fp8_round(rounded), rounded, rtol=1e-6)


def test_a_scale_decides_where_in_a_binade_a_value_is_rounded():
    x = torch.tensor([[448.0, -3.3], [1.0, 0.3]])
    # 3.3 has neighbours 3.25 and 3.5. 0.3 has 0.28125 and 0.3125 by the scale of 448, 128/448 by its own.
    assert fp8_round(x, per_tensor=True).tolist() == [[448.0, -3.25], [1.0, 0.3125]]
    assert fp8_round(x)[1].tolist() == pytest.approx([1.0, 128 / 448])
    assert fp8_round(x[1], headroom=448.0)[1].item() == 0.3125


def test_every_fault_of_a_checkpoint_is_listed(tmp_path):
    shutil.copy(GOLDEN / "tiny/config.json", tmp_path)
    tensors = load_file(GOLDEN / "tiny/model.safetensors")
    tensors["layers.0.mixer.impl.mixer.dt"] = tensors.pop("layers.0.mixer.impl.mixer.dt_bias")
    tensors["final_norm.weight"] = torch.ones(7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not hold the reference's tensors") as error:
        load_reference(tmp_path)
    assert str(error.value).splitlines()[1:] == [
        "  missing: layers.0.mixer.impl.mixer.dt_bias",
        "  unread: layers.0.mixer.impl.mixer.dt",
        "  shape of final_norm.weight: expected (128,), found (7,)",
    ]


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path):
    shutil.copy(GOLDEN / "tiny/config.json", tmp_path)
    tensors = load_file(GOLDEN / "tiny/model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from embedding\.weight"):
        load_reference(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"it needs config\.json and model"):
        load_reference(tmp_path)


def golden_config(**changes):
    values = json.loads((GOLDEN / "tiny/config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value != "absent"}


def test_a_missing_key_is_named_with_its_spellings():
    values = golden_config(hidden_size="absent", memory_dim="absent")
    with pytest.raises(ValueError, match="no usable") as error:
        Metis16Config(**values)
    assert str(error.value).splitlines()[1:] == [
        "  missing: hidden_size or d_model",
        "  missing: memory_dim",
    ]


def test_keys_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"contradictory: .*'n_layers': 5"):
        Metis16Config(**golden_config(n_layers=5))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads divides"),
        ({"mamba_ngroups": 3}, "mamba_ngroups divides"),
        ({"mamba_head_dim": 48}, "mamba_head_dim divides"),
        ({"attention_layer_indices": [1, 6]}, r"ascend within 0\.\.5"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok <="),
        ({"num_passes": 6}, "num_passes <= max_passes"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change, rule):
    with pytest.raises(ValueError, match=rule):
        Metis16Config(**golden_config(**change))


@pytest.mark.parametrize("module", [configuration_metis16, sublayers_metis16, reference])
def test_the_remote_code_imports_torch_and_transformers_alone(module):
    allowed = {"torch", "transformers"} | set(sys.stdlib_module_names)
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed


def run_golden(*folders):
    return golden.run(SimpleNamespace(folders=list(folders), engine=False))


def copied_golden(tmp_path, change):
    folder = tmp_path / "tiny"
    shutil.copytree(GOLDEN / "tiny", folder)
    expected = load_file(folder / "expected.safetensors")
    change(expected)
    save_file(expected, folder / "expected.safetensors")
    return folder


def test_golden_passes_both_folders(capsys):
    assert run_golden(GOLDEN / "tiny", GOLDEN / "tiny16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["pass", "tiny", "prompt0"],
        ["pass", "tiny", "prompt1"],
        ["pass", "tiny16", "prompt0"],
        ["pass", "tiny16", "prompt1"],
    ]
    assert "every block within 1e-05" in lines[0]


def test_golden_fails_past_the_limit(tmp_path, capsys):
    def change(expected):
        expected["prompt1.logits"][7, 3] += 3e-4

    assert run_golden(copied_golden(tmp_path, change)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pass tiny prompt0")
    assert lines[1].startswith("fail tiny prompt1 (300 tokens): largest logit error 3.0e-04")


def test_golden_fails_on_what_is_not_a_number(tmp_path):
    def change(expected):
        expected["prompt0.logits"][0, 0] = torch.nan

    assert run_golden(copied_golden(tmp_path, change)) == 1


def test_golden_names_the_first_block_that_deviates(tmp_path, capsys):
    def change(expected):
        for block in (8, 11):
            expected["prompt0.streams"][block, 3, 1] *= 1.01

    run_golden(copied_golden(tmp_path, change))
    assert "first block that deviates: pass 1, layer 2" in capsys.readouterr().out


def test_golden_names_every_missing_file(tmp_path, capsys):
    shutil.copy(GOLDEN / "tiny/config.json", tmp_path)
    assert run_golden(GOLDEN / "tiny", tmp_path) == 2
    listed = capsys.readouterr().err.split()[3:]
    assert listed == [str(tmp_path / "model.safetensors"), str(tmp_path / "expected.safetensors")]
