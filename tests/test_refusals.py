# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own configuration refuses for Metis-1.6, before anything is loaded."""

import json
import shutil
from types import SimpleNamespace

import pytest

from tests.engines import configure


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide both the 4 Mamba"),
        ({"pipeline_parallel_size": 2}, "the stack runs 2 times per token"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "on a CPU take no heed of which experts a rank holds",
        ),
        ({"data_parallel_size": 2}, "cannot gather tokens for experts on a CPU"),
        ({"enable_lora": True}, "merge the adapter into the checkpoint"),
        ({"prefix_match_unit": 32}, "leave it unset"),
        ({"mamba_cache_mode": "all"}, "use align, which is the default"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding is not proven",
        ),
        ({"quantization": "fp8_per_tensor"}, "vLLM quantizes no experts on a CPU"),
        ({"use_replayssm": True}, "is not supported for architecture 'Metis16ForCausalLM'"),
        ({"hf_overrides": {"num_experts_per_tok": 99}}, "num_experts_per_tok = 99 exceeds"),
        (
            {"hf_overrides": {"mamba_ssm_cache_dtype": "bf16"}},
            "'bf16' of config.json: expected auto, float32, float16, bfloat16; mend it there",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_work_is_refused_with_a_sentence(checkpoint, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        configure(checkpoint("tiny"), **arguments)


def test_batch_invariance_is_refused_before_a_layer_asserts_it(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="no batch-invariant kernels for Mamba-2; unset it"):
        configure(checkpoint("tiny"))


def test_every_refusal_comes_at_once(checkpoint):
    with pytest.raises(ValueError, match="cannot run with these settings") as error:
        configure(checkpoint("tiny"), tensor_parallel_size=3, prefix_match_unit=32)
    assert str(error.value).count("\n  - ") == 2


def test_a_missing_key_is_named_and_an_override_supplies_it(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["num_experts_per_tok"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="num_experts_per_tok: missing; looked for the keys"):
        configure(folder)
    configured = configure(folder, hf_overrides={"num_experts_per_tok": 4})
    assert configured.model_config.hf_config.num_experts_per_tok == 4


def test_the_state_is_float32_and_prefixes_are_cached_in_align_mode_by_default(checkpoint):
    configured = configure(checkpoint("tiny"), dtype="bfloat16", enable_prefix_caching=True)
    assert configured.cache_config.mamba_ssm_cache_dtype == "float32"
    assert configured.cache_config.mamba_cache_mode == "align"


@pytest.mark.parametrize(
    ("declared", "asked", "expected"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("auto", "auto", "float32"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_the_state_has_the_dtype_that_is_asked_for_or_else_declared(
    checkpoint, declared, asked, expected
):
    configured = configure(
        checkpoint("tiny"),
        dtype="bfloat16",
        mamba_ssm_cache_dtype=asked,
        hf_overrides={"mamba_ssm_cache_dtype": declared},
    )
    assert configured.cache_config.mamba_ssm_cache_dtype == expected


def test_a_model_that_declares_another_state_than_its_mixers_keep_is_told_both():
    import torch

    from vllm_metis.model.mamba import Metis16Mamba

    kept = torch.bfloat16, torch.float32
    mamba = SimpleNamespace(prefix="layers.0.mamba", get_state_dtype=lambda: kept)
    mixer = SimpleNamespace(mamba=mamba)
    Metis16Mamba.check_states(mixer, kept)
    with pytest.raises(ValueError, match=r"declares .*bfloat16, torch.bfloat16.*keeps .*float32"):
        Metis16Mamba.check_states(mixer, (torch.bfloat16, torch.bfloat16))
