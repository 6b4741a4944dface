# SPDX-License-Identifier: Apache-2.0
"""What traffic a soak cell makes, and what of it decides."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from harness.kinds.settings import (
    AtLeastOne,
    CheckpointConfig,
    EngineCellSettings,
    EngineConfig,
    Seconds,
)
from harness.strict_yaml import StrictModel, incomplete

GoodKind = Literal["chat", "tools", "structured", "prefix", "long"]
ClientKind = Literal[GoodKind, "disconnect", "abort", "bad"]

GOOD_KINDS: tuple[GoodKind, ...] = ("chat", "tools", "structured", "prefix", "long")
"""Kinds of good requests; a client may also leave one (`disconnect`, `abort`) or send a `bad` one."""

Growth = Annotated[float, Field(gt=1)]
Count = Annotated[int, Field(ge=0)]


class AtLeast(StrictModel):
    """What the traffic must have reached for the cell to count."""

    in_flight: Annotated[AtLeastOne, Field(description="Requests that clients had open at once.")]
    running: Annotated[AtLeastOne, Field(description="Requests that the schedulers ran at once.")]
    of_a_kind: Annotated[
        AtLeastOne, Field(description="Requests of each kind that ended as they should.")
    ]
    preemptions: Count
    hits: Annotated[Count, Field(description="Prompt tokens from the prefix cache.")]
    engines: Annotated[
        AtLeastOne,
        Field(description="Engines, of data parallel replicas, that finished requests."),
    ]


class Limits(StrictModel):
    """The median over the last third of the traffic's time, over that of the second third, at most."""

    rss_growth: Annotated[Growth, Field(description="Resident memory of the server's processes.")]
    card_growth: Annotated[
        Growth, Field(description="Memory in use on the cards, where there are any.")
    ]
    ttft_growth: Annotated[Growth, Field(description="Time to the first token of streams.")]
    itl_growth: Annotated[Growth, Field(description="Time between two tokens of streams.")]


class Clients(StrictModel):
    """Traffic of a soak cell, greedy throughout; harness/kinds/soak/child/clients.py."""

    seed: Annotated[int, Field(description="Of every draw of the clients.")]
    duration_s: Seconds
    concurrency: Annotated[
        AtLeastOne, Field(description="Clients, each with one request open at most.")
    ]
    pause_s: Annotated[Seconds, Field(description="Mean pause of a client between its requests.")]
    distinct: Annotated[AtLeastOne, Field(description="Different requests of a kind, at most.")]
    max_tokens: AtLeastOne
    streamed: Annotated[
        float, Field(ge=0, le=1, description="Share of answers asked for as streams.")
    ]
    mix: Annotated[
        dict[ClientKind, Annotated[float, Field(gt=0)]],
        Field(
            min_length=1,
            description="Weight of each kind of request; harness/kinds/soak/child/requests.py.",
        ),
    ]
    sample_s: Annotated[
        Seconds,
        Field(description="Pause between two looks at memory, latency and counters."),
    ]
    at_least: AtLeast
    limits: Limits


class ServedEngine(EngineConfig):
    """One engine configuration; the cells that share it share one process."""

    @field_validator("args")
    @classmethod
    def _names_its_context(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "max_model_len" not in args:
            raise incomplete("`engine.args.max_model_len` is missing")
        return args


class SoakSettings(EngineCellSettings):
    """A server under mixed traffic of many clients."""

    checkpoint: CheckpointConfig
    engine: ServedEngine
    soak: Clients
