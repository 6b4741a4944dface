# SPDX-License-Identifier: Apache-2.0
"""Turns for the parser tests: rendered by a checkpoint's chat template, replayed in every delta size."""

import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.prompts.conversations import ToolCall, Turn
from harness.serving.answers import Answer
from harness.serving.replay import ALL, WHOLE, Replay, ScriptedEngine

DELTA_SIZES = [WHOLE, 1, 2, 3, 7, ALL]
MODELS = ["tiny", *filter(None, [os.environ.get("METIS_MODEL_DIR")])]
"""Checkpoints whose tokenizer and template are tested: the tiny one, and the release where it is."""
QUESTION = {"role": "user", "content": "Go on."}
SPECIAL = re.compile(
    r"<\|(?:endoftext|padding|fim_prefix|fim_middle|fim_suffix|tool_call|tool_result)\|>"
)


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if properties is not None:
        function["parameters"] = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}})
WRITE = tool("write_file", {"path": {"type": "string"}, "content": {"type": "string"}})
NOW = tool("now")
TOOLS = [WEATHER, WRITE, NOW]


def spoken(
    reasoning: str | None,
    content: str = "",
    calls: Sequence[tuple[str, dict[str, Any]]] = (),
) -> Turn:
    """What a model writes in one turn; without reasoning, not even an empty one, in direct mode."""
    return Turn(
        id="turn",
        messages=[QUESTION],
        tools=TOOLS,
        enable_thinking=reasoning is not None,
        reasoning=reasoning,
        content=content,
        tool_calls=[ToolCall(name, arguments) for name, arguments in calls],
    )


class Stage:
    """Replays turns with the tokenizer and template of one model."""

    def __init__(self, folder: Path) -> None:
        self.engine = ScriptedEngine(folder)
        self.tokenizer = self.engine.tokenizer
        self.both = Replay(self.engine)
        self.reasoning_only = Replay(self.engine, "metis", "")
        self.tool_only = Replay(self.engine, "", "metis")

    def written(self, turn: Turn, history: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the tokens of the turn as the template renders it after this history.

        What spells a special token in the turn's own texts is spelled with ordinary tokens.
        """
        messages = [*(history or [QUESTION]), _for_template(turn.message, hide=True)]
        messages[:-1] = [_for_template(message) for message in messages[:-1]]
        render = functools.partial(
            self.tokenizer.apply_chat_template, tokenize=False, **turn.chat_template_kwargs
        )
        prompt = render(messages[:-1], add_generation_prompt=True)
        whole = render(messages)
        assert whole.startswith(prompt)
        return self.encode(whole.removeprefix(prompt))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; parts that went through `spelled` get ordinary ones."""
        token_ids: list[int] = []
        for part in re.split(f"({SPECIAL.pattern})", text):
            token_ids += self.tokenizer.encode(
                part.translate(_SHOWN),
                add_special_tokens=False,
                split_special_tokens=not SPECIAL.fullmatch(part),
            )
        return token_ids

    def answer(
        self,
        token_ids: list[int],
        delta_size: int | Sequence[int] = WHOLE,
        server: Replay | None = None,
        **request: Any,
    ) -> Answer:
        """Return what a client gets for these tokens; the server has both parsers by default."""
        body = {"messages": [QUESTION], "tools": TOOLS, **request}
        (answer,) = (server or self.both).answers(body, [token_ids], delta_size)
        return answer

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)


@functools.cache
def stage(folder: Path) -> Stage:
    """Return the stage of a checkpoint, one per process."""
    return Stage(folder)


# Stand-ins from a private use area for the characters that begin and end a special token.
_SHOWN = {0xE000: "<|", 0xE001: "|>"}


def spelled(text: str) -> str:
    """Return the text so that `Stage.encode` spells special tokens in it with ordinary ones."""
    return SPECIAL.sub(_hide, text)


def _for_template(message: dict[str, Any], hide: bool = False) -> dict[str, Any]:
    """Return the message with parsed arguments, as vLLM gives it to a template."""
    message = json.loads(spelled(json.dumps(message)) if hide else json.dumps(message))
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def _hide(spelling: re.Match[str]) -> str:
    return f"\ue000{spelling[0][2:-2]}\ue001"
