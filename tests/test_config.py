# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: spellings, what is missing or contradictory, and the engine's settings."""

import json
from types import SimpleNamespace

import pytest

from harness.checkpoints.shapes import SHAPES
from harness.checkpoints.write import config_of
from tests.conftest import GOLDEN
from vllm_metis.config import FIELDS, REQUIRED, ConfigError, Metis16Config
from vllm_metis.hook import Metis16ConfigHook, UnsupportedError, tensor_parallel_sizes

TINY = json.loads((GOLDEN / "tiny" / "config.json").read_text())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_sound_configuration(shape):
    assert Metis16Config(**config_of(shape)).faults() == []


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_spelling_of_a_field_is_read(field):
    sound = Metis16Config(**TINY)
    value = getattr(sound, field.name)
    values = {k: v for k, v in TINY.items() if k not in field.spellings}
    for spelling in field.spellings:
        config = Metis16Config(**values, **{spelling: value})
        assert config.faults() == []
        assert getattr(config, field.name) == value


@pytest.mark.parametrize(
    "field", [f for f in FIELDS if f.default is REQUIRED], ids=lambda field: field.name
)
def test_a_missing_key_is_named_with_every_spelling_looked_for(field):
    values = {k: v for k, v in TINY.items() if k not in field.spellings}
    with pytest.raises(ConfigError) as error:
        Metis16Config(**values).check()
    assert f"{field.name}: missing; looked for the keys {', '.join(field.spellings)}" in str(
        error.value
    )
    assert "--hf-overrides" in str(error.value)


def test_all_missing_keys_are_named_at_once():
    message = "\n".join(Metis16Config(hidden_size=128).faults())
    for field in FIELDS:
        if field.default is REQUIRED and field.name != "hidden_size":
            assert f"{field.name}: missing" in message


def test_a_key_given_in_an_override_is_no_longer_missing():
    config = Metis16Config(**{k: v for k, v in TINY.items() if k != "num_experts_per_tok"})
    assert config.faults()
    config.update({"num_experts_per_tok": 4})
    assert config.faults() == []


def test_an_override_moves_what_is_derived_from_it():
    config = Metis16Config(**TINY)
    config.update({"hidden_size": 256})
    config.faults()
    assert config.mamba_d_inner == 512


def test_contradictory_spellings_are_named_with_their_values():
    faults = Metis16Config(**TINY, d_model=256).faults()
    assert faults == ["hidden_size: contradictory keys hidden_size = 128, d_model = 256; keep one"]


def test_an_assumed_constant_is_a_warning(caplog):
    config = Metis16Config(**{k: v for k, v in TINY.items() if k != "mamba_norm_eps"})
    config.check()
    assert "none of the keys mamba_norm_eps" in caplog.text
    assert "assuming 1e-05" in caplog.text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"memory_dim": 0}, "memory_dim: expected a positive number, found 0"),
        ({"memory_dim": "wide"}, "memory_dim: expected a positive number, found 'wide'"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of"),
        ({"mamba_ngroups": 3}, "mamba_num_heads = 8 is not a multiple of mamba_n_groups = 3"),
        ({"mamba_num_heads": 6}, "mamba_num_heads * mamba_head_dim = 6 * 32 contradicts"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17 exceeds num_experts = 16"),
        ({"max_passes": 1}, "max_passes = 1 is below num_passes = 2"),
        ({"attention_layer_indices": [1, 6]}, "expected rising layer numbers from 0 to 5"),
        ({"attention_layer_indices": [4, 1]}, "expected rising layer numbers from 0 to 5"),
        ({"attention_layer_indices": []}, "at least one attention and one Mamba layer"),
        ({"attention_layer_indices": "1,4"}, "expected a list of layer numbers, found 1,4"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu: Metis-1.6 has SiLU throughout"),
    ],
)
def test_an_impossible_value_is_refused_with_what_was_expected(change, expected):
    (fault,) = Metis16Config(**TINY | change).faults()
    assert expected in fault


def test_a_saved_configuration_reads_back_the_same(tmp_path):
    config = Metis16Config(**TINY)
    config.save_pretrained(tmp_path)
    again = Metis16Config.from_pretrained(tmp_path)
    assert again.faults() == []
    assert again.to_dict() == config.to_dict()


def engine(shape: str = "logos", **changes: object) -> SimpleNamespace:
    """Return the parts of a vLLM configuration that the hook looks at, `changes` applied."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_eplb=False,
        use_ubatching=False,
        enable_ep_weight_filter=False,
        enable_expert_parallel=False,
        data_parallel_size=1,
    )
    cache = SimpleNamespace(
        mamba_ssm_cache_dtype="auto", mamba_cache_mode="align", prefix_match_unit=None
    )
    settings = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=Metis16Config(**config_of(shape)), quantization=None
        ),
        parallel_config=parallel,
        cache_config=cache,
        compilation_config=SimpleNamespace(fast_moe_cold_start=None),
        lora_config=None,
        speculative_config=None,
    )
    for name, value in changes.items():
        owner = next(o for o in (parallel, cache, settings) if hasattr(o, name))
        setattr(owner, name, value)
    return settings


@pytest.mark.parametrize(("shape", "sizes"), [("logos", [1, 2, 5, 10]), ("praxis", [1, 2, 4, 8])])
def test_tensor_parallel_sizes_divide_groups_and_kv_heads(shape, sizes):
    assert tensor_parallel_sizes(Metis16Config(**config_of(shape))) == sizes


@pytest.mark.parametrize(
    ("shape", "size"), [("logos", 3), ("logos", 4), ("logos", 8), ("praxis", 3)]
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(shape, size):
    with pytest.raises(UnsupportedError) as error:
        Metis16ConfigHook.verify_and_update_config(engine(shape, tensor_parallel_size=size))
    sizes = {"logos": "1, 2, 5, 10", "praxis": "1, 2, 4, 8"}[shape]
    assert f"tensor_parallel_size {size} does not divide" in str(error.value)
    assert f"sizes that do: {sizes}" in str(error.value)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel_size 2"),
        ("decode_context_parallel_size", 2, "decode_context_parallel_size 2"),
        ("prefill_context_parallel_size", 2, "prefill_context_parallel_size 2"),
        ("enable_eplb", True, "--enable-eplb"),
        ("use_ubatching", True, "--enable-dbo"),
        ("enable_ep_weight_filter", True, "--enable-ep-weight-filter"),
        ("speculative_config", object(), "--speculative-config"),
        ("lora_config", object(), "--enable-lora"),
        ("mamba_cache_mode", "all", "mamba_cache_mode all"),
        ("prefix_match_unit", 32, "prefix_match_unit 32"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(setting, value, expected):
    with pytest.raises(UnsupportedError, match=f"  - {expected}"):
        Metis16ConfigHook.verify_and_update_config(engine(**{setting: value}))


def test_all_refusals_come_in_one_message():
    with pytest.raises(UnsupportedError) as error:
        Metis16ConfigHook.verify_and_update_config(
            engine(tensor_parallel_size=4, pipeline_parallel_size=2, lora_config=object())
        )
    assert str(error.value).count("\n  - ") == 3


@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
def test_an_explicit_ssm_cache_dtype_is_kept(given):
    settings = engine(mamba_ssm_cache_dtype=given)
    Metis16ConfigHook.verify_and_update_config(settings)
    assert settings.cache_config.mamba_ssm_cache_dtype == given


def test_auto_ssm_cache_dtype_means_float32():
    settings = engine()
    Metis16ConfigHook.verify_and_update_config(settings)
    assert settings.cache_config.mamba_ssm_cache_dtype == "float32"


def test_auto_ssm_cache_dtype_heeds_the_checkpoint():
    settings = engine()
    settings.model_config.hf_config.mamba_ssm_cache_dtype = "bfloat16"
    Metis16ConfigHook.verify_and_update_config(settings)
    assert settings.cache_config.mamba_ssm_cache_dtype == "bfloat16"


@pytest.mark.parametrize("shape", ["logos", "praxis"])
def test_blockwise_quantization_of_uneven_widths_is_refused_with_what_works(monkeypatch, shape):
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    settings = engine(shape)
    settings.model_config.quantization = "fp8_per_block"
    rows = {"logos": 12880, "praxis": 10304}[shape]
    with pytest.raises(UnsupportedError, match=f"in_proj has {rows} rows; use fp8_per_tensor"):
        Metis16ConfigHook.verify_and_update_config(settings)


def test_tensorwise_quantization_on_a_card_is_accepted(monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    settings = engine()
    settings.model_config.quantization = "fp8_per_tensor"
    Metis16ConfigHook.verify_and_update_config(settings)


def test_quantization_on_load_is_refused_on_a_cpu_with_what_works():
    settings = engine()
    settings.model_config.quantization = "fp8_per_tensor"
    with pytest.raises(
        UnsupportedError, match="serve the checkpoint as it is, or an FP8 checkpoint"
    ):
        Metis16ConfigHook.verify_and_update_config(settings)


def test_an_fp8_checkpoint_is_not_quantization_on_load():
    settings = engine()
    settings.model_config.quantization = "compressed-tensors"
    settings.model_config.hf_config.quantization_config = {"quant_method": "compressed-tensors"}
    Metis16ConfigHook.verify_and_update_config(settings)


def test_experts_that_are_called_once_per_pass_are_never_found_by_counting():
    settings = engine()
    settings.compilation_config.fast_moe_cold_start = True
    Metis16ConfigHook.verify_and_update_config(settings)
    assert settings.compilation_config.fast_moe_cold_start is False
