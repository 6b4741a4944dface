# SPDX-License-Identifier: Apache-2.0
"""A matrix whose engine and reference are the fake child (tests/without_vllm/fake_child.py)."""

import sys
from pathlib import Path

CHILD = str(Path(__file__).with_name("fake_child.py"))
CHILDREN = {
    "parity": (sys.executable, CHILD, "engine"),
    "reference": (sys.executable, CHILD, "reference"),
}


def matrix_text(*names: str, start: str = "fine", cell_s: float = 20, start_s: float = 20) -> str:
    """A matrix of one engine group with a cell for each behaviour of the fake child."""
    cells = "\n".join(
        f"    {name}:\n      workload:\n"
        f"        rounds: [{{schedule: alone, cached: none, prompts: [{name}]}}]"
        for name in names
    )
    prompts = "\n".join(
        f"  {name}: [{{random: {{length: {500 if name == 'toolong' else 20}, seed: 1}}}}]"
        for name in names
    )
    return f"""\
schema_version: 1
kind: parity
question: What does the runner do with it?
prompts:
{prompts}
base:
  checkpoint: {{shape: tiny, dtype: float32, seed: 1, taught: false, quantize: none}}
  precision: fp32
  engine: {{args: {{dtype: float32}}, env: {{FAKE_START: {start}}}}}
  sampling: {{max_tokens: 3, temperature: 0.0, ignore_eos: true, logprobs: 4}}
  reach: {{mamba_ssm_cache_dtype: float32, mamba_cache_mode: none, prefill: whole,
    preemptions: none, cudagraphs: NONE, quantization: null}}
  timeout: {{start_s: {start_s}, cell_s: {cell_s}}}
axes:
  child:
{cells}
"""
