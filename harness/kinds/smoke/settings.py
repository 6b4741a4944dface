# SPDX-License-Identifier: Apache-2.0
"""What a smoke cell looks at."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from harness.kinds.settings import (
    AtLeastOne,
    EngineCellSettings,
    EngineConfig,
    Workload,
    prompts_of,
)
from harness.strict_yaml import StrictModel, incomplete

AtLeastTwo = Annotated[int, Field(ge=2)]


class ServedOrNot(EngineConfig):
    """One engine configuration; the cells that share it share one process."""

    serve: Annotated[
        bool,
        Field(description="`vllm serve` with these arguments, or an engine in the child."),
    ]


class ParityCheck(StrictModel):
    """Logprobs of the workload's prompts, against the model's own Transformers code."""

    check: Literal["parity"]


class GenerationCheck(StrictModel):
    """The answers to the workload's chats."""

    check: Literal["generation"]
    max_tokens: AtLeastTwo


class TimingCheck(StrictModel):
    """Equal streams of random tokens, held open at once, round after round."""

    check: Literal["timing"]
    streams: AtLeastOne
    prompt_tokens: AtLeastOne
    max_tokens: AtLeastTwo
    rounds: AtLeastOne
    seed: int


class SmokeSettings(EngineCellSettings):
    """An engine or a server on a model that was not made here."""

    engine: ServedOrNot
    smoke: Annotated[ParityCheck | GenerationCheck | TimingCheck, Field(discriminator="check")]
    workload: Workload | None = None

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if not isinstance(self.smoke, TimingCheck) and self.workload is None:
            raise incomplete("`workload` is missing")
        return self

    @property
    def prompt_names(self) -> list[str]:
        return prompts_of(self.workload)
