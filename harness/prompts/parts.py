# SPDX-License-Identifier: Apache-2.0
"""The pieces of a matrix's prompts, as its YAML spells them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from harness.strict_yaml import StrictModel


class Chat(StrictModel):
    """Messages rendered by the checkpoint's chat template, generation prompt included."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] = []
    enable_thinking: bool

    def as_written(self) -> dict[str, Any]:
        """Return the keys that the matrix gives."""
        return self.model_dump(exclude_unset=True)


class InBlocks(StrictModel):
    """blocks * the engine's block size + plus"""

    blocks: Annotated[int, Field(ge=0)]
    plus: int


class RandomTokens(StrictModel):
    """Ordinary tokens drawn evenly."""

    length: Annotated[int, Field(ge=1)] | InBlocks
    seed: int


class PromptPart(StrictModel):
    """A piece of a prompt."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    chat: Chat | None = None
    random: RandomTokens | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"expected one of chat, random and token_ids, found {found}")
        return self
