# SPDX-License-Identifier: Apache-2.0
"""What a tensor's spec knows: how it is split over ranks, what is FP8 of it, and its bytes."""

import pytest

from harness.checkpoints.write import config_of
from vllm_metis.checkpoint.specs import (
    MODEL_DTYPES,
    Float8,
    Split,
    TensorSpec,
    checkpoint_tensors,
    parts_of,
)
from vllm_metis.cli.plan import weights_bytes
from vllm_metis.config import Metis16Config
from vllm_metis.hook import tensor_parallel_sizes

# By model and dtype, a rank of each TP size that divides it.
WEIGHTS = {
    "logos": {
        "fp32": {1: 40900999148, 2: 20684993548, 5: 8555387100, 10: 4512183664},
        "bf16": {1: 20464417752, 2: 10356410872, 5: 4291601340, 10: 2270000736},
        "fp8": {1: 10835305752, 2: 5549734552, 5: 2378384124, 10: 1321273728},
    },
    "praxis": {
        "fp32": {1: 11772716580, 2: 6002128676, 4: 3116834724, 8: 1674187748},
        "bf16": {1: 5893578260, 2: 3008282388, 4: 1565634452, 8: 844310484},
        "fp8": {1: 3258697748, 2: 1693996052, 4: 911645204, 8: 520469780},
    },
    "tiny": {
        "fp32": {1: 23689764, 2: 13076644, 4: 7770084},
        "bf16": {1: 11989268, 2: 6682516, 4: 4029140},
        "fp8": {1: 7776788, 2: 4601876, 4: 3014420},
    },
}


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("model", WEIGHTS)
def test_the_weights_of_a_rank_take_what_they_always_did(model: str, dtype: str):
    config = Metis16Config(**config_of(model))
    found = {tp: weights_bytes(config, dtype, tp) for tp in tensor_parallel_sizes(config)}
    assert found == WEIGHTS[model][dtype]


@pytest.mark.parametrize(
    ("split", "values", "scales"),
    [(Split.WHOLE, 96, 8), (Split.ROWS, 24, 2), (Split.COLUMNS, 24, 8)],
)
def test_a_rank_of_four_holds_its_share_and_the_scales_of_its_rows(split, values, scales):
    spec = TensorSpec((8, 12), split=split, float8=Float8.RELEASED)
    assert spec.nbytes("bf16", tp=4) == 2 * values
    assert spec.nbytes("fp8", tp=4) == values + 4 * scales
    assert spec.scale_bytes("fp8", tp=4) == 4 * scales
    assert spec.nbytes("fp8") == 96 + 4 * 8


@pytest.mark.parametrize("float8", Float8)
def test_only_what_fp8_releases_keep_so_takes_a_byte_and_has_scales(float8: Float8):
    spec = TensorSpec((8, 12), float8=float8)
    assert spec.quantizable is (float8 is not Float8.REFUSED)
    is_float8 = float8 is Float8.RELEASED
    assert spec.nbytes("fp8") == (96 + 4 * 8 if is_float8 else 2 * 96)
    assert [spec.scale_bytes(dtype) for dtype in ("fp32", "bf16")] == [0, 0]


def test_what_the_model_defines_in_float32_takes_four_bytes_in_every_dtype():
    spec = TensorSpec((8,), fp32=True)
    assert [spec.nbytes(dtype) for dtype in MODEL_DTYPES] == [32, 32, 32]


def kinds(specs: dict[str, TensorSpec], float8: Float8) -> set[str]:
    """Return the modules of layers that are so, without the numbers in their names."""
    return {
        ".".join(part for part in name.split(".")[:-1] if not part.isdigit()).split("layers.")[-1]
        for name, spec in specs.items()
        if spec.float8 is float8
    }


@pytest.mark.parametrize("model", ["logos", "praxis", "tiny"])
def test_float8_is_kept_and_accepted_of_what_the_model_page_lists(model: str):
    specs = checkpoint_tensors(Metis16Config(**config_of(model)))
    assert kinds(specs, Float8.RELEASED) == {
        "moe.experts.gate_up_proj",
        "moe.experts.down_proj",
        "mixer.mamba.in_proj",
        "mixer.qkv_proj",
        "mixer.o_proj",
    }
    assert kinds(specs, Float8.ACCEPTED) == {"mixer.mamba.out_proj"}


def test_parts_of_a_packed_tensor_are_split_and_quantized_like_the_whole():
    config = Metis16Config(**config_of("logos"))
    specs = checkpoint_tensors(config)
    name = "model.layers.5.mixer.qkv_proj.weight"
    parts = parts_of(config, name, specs[name])
    assert sum(part.shape[0] for part in parts.values()) == specs[name].shape[0]
    for dtype in MODEL_DTYPES:
        assert sum(part.nbytes(dtype, tp=2) for part in parts.values()) == specs[name].nbytes(
            dtype, tp=2
        )
