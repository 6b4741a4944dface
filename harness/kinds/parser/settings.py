# SPDX-License-Identifier: Apache-2.0
"""What a parser cell replays."""

from __future__ import annotations

from typing import Literal

from harness.kinds.settings import AtLeastOne, CellSettings, CheckpointConfig, EngineConfig
from harness.strict_yaml import StrictModel

Mode = Literal["thinking", "direct"]
ToolChoice = Literal["auto", "none"]


class ReplayedTurns(StrictModel):
    """What harness/serving/replay.py replays."""

    delta_size: AtLeastOne | Literal["all"]
    history: Literal["none", "turns"]
    mode: Mode
    tool_choice: ToolChoice
    truncation: Literal["none", "every_token"]


class ParserSettings(CellSettings):
    """The parsers, with the tokenizer and the template of a checkpoint that is made here."""

    checkpoint: CheckpointConfig
    parser: ReplayedTurns
    engine: EngineConfig | None = None  # nothing runs in it; matrices may say so
