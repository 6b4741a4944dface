# SPDX-License-Identifier: Apache-2.0
"""What a parity cell runs, and what it claims."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from harness.kinds.settings import (
    AtLeastOne,
    CheckpointConfig,
    EngineCellSettings,
    Text,
    Workload,
    prompts_of,
)
from harness.strict_yaml import StrictModel


class Sampling(StrictModel):
    """vLLM's SamplingParams, greedy."""

    max_tokens: AtLeastOne
    temperature: Annotated[float, Field(ge=0, le=0)]
    ignore_eos: bool
    logprobs: Annotated[
        int,
        Field(ge=2, description="Top tokens of each position; two at least, for their margin."),
    ]


class Reach(StrictModel):
    """What must have happened for the cell to count; harness/kinds/parity/reach.py."""

    mamba_ssm_cache_dtype: Literal["float32", "bfloat16", "float16"]
    mamba_cache_mode: Literal["none", "align", "all"]
    prefill: Annotated[
        Literal["whole", "blocks"] | AtLeastOne,
        Field(
            description="whole: each prompt in one step. A number: chunks of that many tokens. "
            "blocks: also cut at block boundaries, not checked."
        ),
    ]
    preemptions: Literal["none", "some"]
    cudagraphs: Annotated[
        Literal["NONE", "PIECEWISE", "FULL"],
        Field(description="Runtime mode that steps must show."),
    ]
    quantization: Annotated[
        str | None, Field(description="As resolved: null, compressed-tensors, …")
    ]


class ParitySettings(EngineCellSettings):
    """An engine on a checkpoint that is made here, against the reference."""

    checkpoint: CheckpointConfig
    precision: Annotated[
        Literal["fp32", "bf16", "fp8", "fp8load"],
        Field(
            description="What the port computes in to measure the noise floor; "
            "harness/judging/tolerance.py."
        ),
    ]
    sampling: Sampling
    workload: Workload
    reach: Reach
    measure_only: Annotated[
        Text | None,
        Field(
            description="Why the port has no floor for this cell: budgets are shown, and only reach "
            "and finite figures judged."
        ),
    ] = None

    against: Annotated[
        Literal["reference", "itself"],
        Field(
            description="itself: for shapes too large for the reference. Weights are drawn in the engine, "
            "prompts are random tokens, and all that is judged is that rounds with `times` above 1 come "
            "back the same."
        ),
    ] = "reference"

    @model_validator(mode="after")
    def _itself_is_asked_again(self) -> Self:
        if self.against == "itself":
            if not self.workload.repeats:
                raise ValueError("against `itself`, a round must have `times` above 1")
            if self.checkpoint.taught or self.checkpoint.quantize != "none":
                raise ValueError("against `itself` there is no checkpoint to teach or to quantize")
        return self

    @property
    def prompt_names(self) -> list[str]:
        return prompts_of(self.workload)
