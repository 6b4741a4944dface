# SPDX-License-Identifier: Apache-2.0
"""The settings of a cell that kinds share, as a matrix spells them.

`matrices/schema.json` is made of these models and of those in the kinds' folders, so a docstring or a
description here is what an editor shows. Every field without a default must be given by the matrix,
so that nothing has a silent default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from harness.checkpoints.shapes import Dtype, Quantization, Shape
from harness.strict_yaml import StrictModel

OWN_ARGUMENTS = (
    "model",
    "tokenizer",
    "disable_log_stats",
    "enable_logging_iteration_details",
    "cudagraph_metrics",
)
"""Engine arguments that the harness sets itself."""

AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


def _not_own(name: str) -> str:
    if name in OWN_ARGUMENTS:
        raise ValueError(f"the harness sets {name} itself")
    return name


EngineArgument = Annotated[
    str,
    AfterValidator(_not_own),
    Field(json_schema_extra={"not": {"enum": list(OWN_ARGUMENTS)}}),
]


class CheckpointConfig(StrictModel):
    """A checkpoint of harness/checkpoints, built once a run."""

    shape: Shape
    dtype: Dtype
    seed: int
    taught: Annotated[bool, Field(description="Overfitted on the scripted conversations.")]
    quantize: Annotated[
        Quantization,
        Field(
            description="Passed through harness/checkpoints/quantize.py. fp8_with_out_proj: Mamba's "
            "output projection too."
        ),
    ]


class EngineConfig(StrictModel):
    """One engine configuration; the cells that share it share one process."""

    args: Annotated[
        dict[EngineArgument, Any], Field(description="vLLM's EngineArgs, by vLLM's own names.")
    ]
    env: dict[str, str]


class Timeout(StrictModel):
    """Longest start of an engine, and longest run of a cell."""

    start_s: Seconds
    cell_s: Seconds


class Expect(StrictModel):
    """The engine must refuse to start, with a message that this pattern finds."""

    refusal: Text


class Round(StrictModel):
    """Prompts that are asked in one way."""

    prompts: Annotated[list[str], Field(min_length=1)]
    schedule: Annotated[
        Literal["alone", "batched", "arrivals"],
        Field(
            description="alone: one after another. batched: all at once. arrivals: one more every "
            "arrive_every_steps steps."
        ),
    ]
    cached: Annotated[
        Literal["none", "repeat", "some", "any"],
        Field(
            description="num_cached_tokens to find. none: 0. repeat: every whole block before the "
            "last prompt token. some: whole blocks, one request above 0. any: whole blocks."
        ),
    ]
    arrive_every_steps: AtLeastOne | None = None
    before: Annotated[
        Literal["sleep", "sleep_deeply", "reload"] | None,
        Field(
            description="Done to the idle engine before the round. sleep: weights off the card and "
            "back. sleep_deeply: weights given up and read anew. reload: weights set to zero and "
            "read anew."
        ),
    ] = None
    times: Annotated[
        AtLeastOne,
        Field(
            description="How often the round is asked, the same requests in the same order. The first "
            "time is judged as any round; the others must come back as `same` says."
        ),
    ] = 1
    prompt_rows: Annotated[
        bool,
        Field(
            description="Compare every row of the prefill, by the logprobs of the prompts' own tokens; "
            "else those of generated tokens alone. vLLM reads no prefix cache for such requests."
        ),
    ] = False

    @model_validator(mode="after")
    def _arrive_where_they_do(self) -> Self:
        if (self.schedule == "arrivals") != (self.arrive_every_steps is not None):
            raise ValueError("`arrive_every_steps` belongs to schedule `arrivals`, and only there")
        return self

    @model_validator(mode="after")
    def _compare_what_is_there(self) -> Self:
        if self.prompt_rows and self.times == 1:
            raise ValueError("`prompt_rows` is compared between times: `times` must be above 1")
        if self.prompt_rows and self.cached != "none":
            raise ValueError(
                f"`prompt_rows` and hits exclude each other, as vLLM reads no prefix cache then: "
                f"expected `cached: none`, found {self.cached}"
            )
        return self

    def batches(self) -> Iterator[list[tuple[int, str, int]]]:
        """Yield requests that may meet in the engine: place in the round, prompt, step of arrival."""
        prompts = list(enumerate(self.prompts))
        if self.schedule == "alone":
            yield from ([(index, prompt, 0)] for index, prompt in prompts)
        else:
            every = self.arrive_every_steps or 0
            yield [(index, prompt, index * every) for index, prompt in prompts]


class Spread(StrictModel):
    """A kernel that gives other bits each time, rightly, and how far apart its answers may be."""

    kernel: Annotated[Text, Field(description="Its name, and why it is not deterministic.")]
    spread_nats: Annotated[float, Field(gt=0)]


class Workload(StrictModel):
    """Rounds, one after another on one engine; the prefix cache is emptied before the first."""

    rounds: Annotated[list[Round], Field(min_length=1)]
    same: Annotated[
        Literal["bits"] | Spread,
        Field(
            description="How rounds with `times` above 1 come back. bits: every token and logprob with "
            "the same bits. Else within the spread of a kernel that is named."
        ),
    ] = "bits"

    @model_validator(mode="after")
    def _spread_where_rounds_repeat(self) -> Self:
        if self.same != "bits" and not self.repeats:
            raise ValueError("`same` is about rounds with `times` above 1, and there is none")
        return self

    @property
    def repeats(self) -> bool:
        """Whether a round is asked more than once."""
        return any(one.times > 1 for one in self.rounds)

    @property
    def spread(self) -> Spread | None:
        """What rounds may differ by that are asked again; None for not a bit."""
        return None if self.same == "bits" else self.same


class CellSettings(StrictModel):
    """What cells of every kind have."""

    timeout: Timeout
    expect: Expect | None = None

    @classmethod
    def recorded(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings of a record; keys that matrices no longer have are nobody's."""
        return cls.model_validate(settings, extra="ignore")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the cell's child."""
        return {}

    @property
    def prompt_names(self) -> list[str]:
        """The prompts of the matrix that the cell uses."""
        return []


class EngineCellSettings(CellSettings):
    """What cells have that run an engine."""

    engine: EngineConfig

    @property
    def environment(self) -> Mapping[str, str]:
        return self.engine.env


def prompts_of(workload: Workload | None) -> list[str]:
    """Return the names of the prompts that a workload uses, each once, sorted."""
    rounds = workload.rounds if workload else []
    return sorted({name for one in rounds for name in one.prompts})
