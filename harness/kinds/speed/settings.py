# SPDX-License-Identifier: Apache-2.0
"""What a speed cell times."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.checkpoints.shapes import Dtype, Shape
from harness.kinds.settings import AtLeastOne, EngineCellSettings
from harness.strict_yaml import StrictModel


class RandomShape(StrictModel):
    """Sizes without a checkpoint: vLLM fills the weights in, and they are drawn anew."""

    shape: Shape
    dtype: Dtype
    seed: int
    twin: Annotated[
        bool,
        Field(description="vLLM's own hybrid with the same matrices instead, to compare with."),
    ] = False


class Load(StrictModel):
    """What a speed cell times: rounds of equal requests that arrive together."""

    phase: Annotated[
        Literal["decode", "prefill"],
        Field(description="decode: the steps after the first token. prefill: the time to it."),
    ]
    streams: AtLeastOne
    prompt_tokens: AtLeastOne
    max_tokens: AtLeastOne
    rounds: AtLeastOne
    seed: int
    profile: Annotated[bool, Field(description="Also profile the kernels of one more round.")]


class SpeedSettings(EngineCellSettings):
    """An engine with random weights, timed."""

    checkpoint: RandomShape
    speed: Load
