# SPDX-License-Identifier: Apache-2.0
"""References that differ in rounding only: they differ, by no more than that, and the same each time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.reference.modeling_metis16 import load_reference
from harness.scoring import child, rounding
from harness.scoring.child import Scorer

TOKENS = torch.arange(3, 19)[None]


def logprobs(model):
    with torch.inference_mode():
        return model(TOKENS).logits.float().log_softmax(-1)


def test_jitter_moves_one_value_in_twelve_to_a_neighbour():
    module = nn.Identity()
    draw = rounding.jitter(module)
    draw.manual_seed(1)
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2)).bfloat16()
    moved = module(x)
    steps = moved.view(torch.int16).int() - x.view(torch.int16).int()
    assert set(steps.unique().tolist()) == {-1, 0, 1}
    assert (steps != 0).float().mean().item() == pytest.approx(1 / 12, rel=0.05)
    for exact in (torch.zeros(99).bfloat16(), torch.ones(99)):  # nothing to move; FP32
        assert torch.equal(module(exact), exact)


def test_jittered_references_are_off_as_plain_bf16_is_and_repeat(checkpoint):
    exact = logprobs(load_reference(checkpoint()))
    served = load_reference(checkpoint(), torch.bfloat16)
    plain = (logprobs(served) - exact).abs().median().item()
    draw = rounding.jitter(served)
    found = []
    for seed in (1, 2, 1):
        draw.manual_seed(seed)
        found.append(logprobs(served))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    for one in found[
        :2
    ]:  # about 1.4 times, from twice the variance; a mean would be a tipped router's
        assert 0.7 * plain < (one - exact).abs().median().item() < 3 * plain


def test_another_order_of_sums_is_off_by_fp32s_rounding(checkpoint):
    exact = logprobs(load_reference(checkpoint()))
    for parts, chunk in rounding.ORDERS:
        model = load_reference(checkpoint())
        rounding.reorder(model, parts, chunk)
        error = (logprobs(model) - exact).abs().max().item()
        assert 1e-7 < error < 1e-4


def test_sequences_go_on_from_a_prompt_that_is_read_once(checkpoint):
    prompt, folder = list(range(3, 300)), str(checkpoint())
    child._read.cache_clear()
    for tokens in ([7, 8, 9], [7, 10, 11, 12], [5]):
        passes, _ = child._passes(folder, "bf16", prompt, tokens)
        with torch.inference_mode():
            whole = load_reference(folder)(torch.tensor([prompt + tokens[:-1]])).logits[0]
        assert torch.allclose(passes["reference"], whole[len(prompt) - 1 :], atol=1e-4)
        assert {one.shape for one in passes.values()} == {(len(tokens), whole.shape[-1])}
    assert child._read.cache_info().misses == 1


def test_company_moves_what_experts_are_given_and_nothing_else(checkpoint):
    model = load_reference(checkpoint())
    model.simulate_fp8("tensor")
    alone = logprobs(model)
    draw = torch.Generator()
    rounding.in_company(model, draw)
    draw.manual_seed(1)
    assert not torch.equal(logprobs(model), alone)
    widened = {
        name for name, one in model.named_modules() if torch.is_tensor(one.__dict__.get("headroom"))
    }
    assert widened
    assert all(".local_experts." in name for name in widened)
    for name in widened:
        headroom = model.get_submodule(name).headroom
        assert 1 <= headroom.min() <= headroom.max() < 2


def job(checkpoint, precision="fp32"):
    sequence = {
        "prompt_token_ids": [3, 4, 5, 6],
        "token_ids": [7, 8],
        "top_token_ids": [[7, 9, 10], [8, 11, 12]],
    }
    return {
        "do": "score",
        "folder": str(checkpoint()),
        "sha256": "0" * 64,
        "precision": precision,
        "sequences": [sequence],
    }


@pytest.mark.parametrize(
    ("precision", "references"), [("fp32", 2), ("bf16", 5), ("fp8", 5), ("fp8load", 5)]
)
def test_scores_hold_what_each_reference_is_off_at_each_token(
    checkpoint, tmp_path, precision, references
):
    wanted = job(checkpoint, precision)
    (made,) = Scorer(tmp_path, tmp_path).handle(wanted).scores
    (again,) = Scorer(tmp_path, tmp_path).handle(wanted).scores
    assert again == made
    errors = made.roundings["decode_logprob_error"]
    assert [len(one) for one in errors] == [2] * references
    assert len({tuple(one) for one in errors}) == references
    if made.port is not None:
        first = abs(made.port.logprobs[1] - made.reference.logprobs[1])
        assert errors[0][1] == pytest.approx(first, rel=1e-3)
    assert made.prompt_floor.positions == 3
    assert made.prompt_floor.maximum["decode_logprob_error"] > 0


def test_passes_are_made_again_by_other_code_and_read_again_by_the_same(
    checkpoint, tmp_path, monkeypatch
):
    made = []

    def passes(*arguments):
        made.append(arguments)
        return real(*arguments)

    real = child._passes
    monkeypatch.setattr(child, "_passes", passes)
    for code, expected in (("one", 1), ("one", 1), ("another", 2), ("one", 2)):
        monkeypatch.setattr(child, "_code_sha256", lambda code=code: code)
        Scorer(tmp_path, tmp_path / "passes").handle(job(checkpoint))
        assert len(made) == expected


def test_what_passes_and_floors_are_made_of_is_in_their_name():
    roots = "scoring.rounding scoring.scores judging.tolerance reference.modeling_metis16"
    code = (
        f"import sys, importlib\nfor n in {roots.split()}: importlib.import_module('harness.' + n)\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('harness.')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(file) for file in run.stdout.split() if not file.endswith("__init__.py")]
    assert Path(rounding.__file__) in files
    for file in files:
        assert any(place in (file, *file.parents) for place in child.PASSES_MADE_BY), file


def test_passes_that_no_run_reads_go_after_a_week(checkpoint, tmp_path):
    Scorer(tmp_path, tmp_path).handle(job(checkpoint))
    (file,) = tmp_path.glob("*.safetensors")
    for days, kept in ((6, True), (8, False)):
        then = time.time() - days * 86400
        os.utime(file, (then, then))
        Scorer(tmp_path, tmp_path)
        assert file.exists() == kept
