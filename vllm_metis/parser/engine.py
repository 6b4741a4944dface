# SPDX-License-Identifier: Apache-2.0
"""The turn's grammar as data, and vLLM's parser engine that follows it.

    <think>
    REASONING
    </think>
    CONTENT<|tool_call|><function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function><|fim_suffix|>

The prompt ends with `<think>` and a line break, or holds an empty think block. Source: the released
models' chat format; the interfaces are those of `vllm/parser/engine` at v0.31.0.
"""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.parser.engine.events import EventType, SemanticEvent
from vllm.parser.engine.parser_engine import ParserEngine, ToolCallSlot
from vllm.parser.engine.parser_engine_config import ParserEngineConfig, ParserState, Transition
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.utils import Tool

from vllm_metis.parser.arguments import Parameters
from vllm_metis.parser.call import FUNCTION_END
from vllm_metis.parser.reasoning import (
    DIRECT,
    THINK_END,
    THINK_START,
    THINKING,
    Opening,
    ReasoningEnd,
    opening_of,
)
from vllm_metis.parser.request import Request, schema_of
from vllm_metis.parser.token_text import token_texts
from vllm_metis.parser.tool_grammar import binding
from vllm_metis.parser.turn import CALL, CONTENT, ENDS, OVER, REASONING, TurnReader
from vllm_metis.parser.workarounds import was_direct_after_all

GRAMMAR = ParserEngineConfig(
    name="metis",
    initial_state=REASONING,
    terminals={"THINK_START": THINK_START, "THINK_END": THINK_END, "FUNC_END": FUNCTION_END},
    token_id_terminals={
        "TOOL_START": "<|tool_call|>",
        "TURN_END": "<|fim_suffix|>",
        "TEXT_END": "<|endoftext|>",
        # Without a transition: they mean nothing in a turn, and are dropped from its text.
        "PADDING": "<|padding|>",
        "FIM_PREFIX": "<|fim_prefix|>",
        "FIM_MIDDLE": "<|fim_middle|>",
        "TOOL_RESULT": "<|tool_result|>",
    },
    transitions={
        (CONTENT, "THINK_START"): Transition(REASONING, (EventType.REASONING_START,)),
        (REASONING, "THINK_END"): Transition(CONTENT, (EventType.REASONING_END,)),
        (REASONING, "TOOL_START"): Transition(CALL, (EventType.REASONING_END,)),
        (CONTENT, "TOOL_START"): Transition(CALL),
        (CALL, "TOOL_START"): Transition(CALL),
        (CALL, "FUNC_END"): Transition(CONTENT),
    }
    | {(state, end): Transition(OVER) for state in (REASONING, CONTENT, CALL) for end in ENDS},
    # `TurnReader` decides what white space is the template's.
    strip_trailing_reasoning_whitespace=False,
    drop_whitespace_only_content_before_tools=False,
    strip_content_whitespace_with_tools=False,
)
_TEXT_FIELDS = {EventType.TEXT_CHUNK: "content", EventType.REASONING_CHUNK: "reasoning"}
_ENDS = [GRAMMAR.token_id_terminals[end] for end in ENDS]


class MetisEngine(ParserEngine):
    """vLLM's parser engine over `TurnReader`."""

    _engine: TurnReader  # has what is used of a StreamingParserEngine

    def __init__(
        self, tokenizer: TokenizerLike, tools: list[Tool] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, tools, parser_engine_config=GRAMMAR, **kwargs)
        self._texts = token_texts(tokenizer)
        self._special = {
            self.vocab[text]: text
            for text in GRAMMAR.token_id_terminals.values()
            if text in self.vocab
        }
        marker = GRAMMAR.token_id_terminals["TOOL_START"]
        if marker not in self.vocab:
            raise ValueError(
                f"the metis parsers need a tokenizer with the token {marker}, and this one has none: "
                "serve a Metis-1.6 checkpoint with its own tokenizer, or choose another parser"
            )
        self.marker = self.vocab[marker]
        self._engine = TurnReader(GRAMMAR, self._texts, self._special, self._parameters_of)
        thinking = (kwargs.get("chat_template_kwargs") or {}).get("enable_thinking")
        self._default = DIRECT if thinking is False else THINKING
        self._guessed = thinking is None  # neither the prompt nor the request tells the mode
        self._engine.opening = self._default
        self._engine.reset()
        self._request: Request | None = None
        self._parameters: dict[str, Parameters] = {}

    # What the prompt and the ids tell

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return self._opening_after(input_ids).state is not REASONING

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        self.read_prompt(prompt_token_ids)
        self._reset()

    def read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Learn from the prompt how the turn starts."""
        opening = opening_of(prompt_token_ids, self._texts, self._special.keys())
        self._guessed = opening is None and self._guessed
        self._engine.opening = opening or self._default

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Sequence[int]
    ) -> bool:
        """Whether reasoning ends within `delta_ids`, the last of `input_ids`."""
        end = self._new_reasoning_end()
        seen = len(input_ids) - len(delta_ids)
        end.first(input_ids[max(0, seen - len(THINK_END)) : seen])
        return end.first(delta_ids) is not None

    def extract_content_ids(self, input_ids: Sequence[int]) -> list[int]:
        end = self._new_reasoning_end().first(input_ids)
        if end is None:
            return list(input_ids)
        return list(input_ids[end + (input_ids[end] != self.marker) :])

    @property
    def thinks(self) -> bool:
        """Whether the turn starts with reasoning, as far as is known."""
        return self._engine.opening.state is REASONING

    @property
    def knows_its_prompt(self) -> bool:
        return not self._guessed

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends a turn."""
        return self._special.get(token_id) in _ENDS

    def _opening_after(self, token_ids: Sequence[int]) -> Opening:
        return opening_of(token_ids, self._texts, self._special.keys()) or self._default

    def _new_reasoning_end(self) -> ReasoningEnd:
        return ReasoningEnd(self._texts, self._special.keys(), self.marker)

    # What the request tells

    def _check_skip_tool_parsing(self, request: Request) -> None:
        if request is self._request:
            return
        self._request = request
        if tools := getattr(request, "tools", None):
            self._tools = tools
        self._parameters.clear()
        self._suppress_tool_calls = getattr(request, "tool_choice", None) == "none"
        constraint = request.extract_structured_outputs() if isinstance(request, Request) else None
        self._engine.binding = binding(constraint, self.marker)

    def _parameters_of(self, name: str) -> Parameters:
        if name not in self._parameters:
            self._parameters[name] = Parameters(schema_of(name, self._tools or ()))
        return self._parameters[name]

    # From events to API fields

    def _single_pass_parse(
        self, text: str, token_ids: Sequence[int], initial_state: ParserState | None = None
    ) -> tuple[str | None, str | None, ExtractedToolCallInformation]:
        result = super()._single_pass_parse(text, token_ids, initial_state)
        if initial_state is None and was_direct_after_all(
            self._guessed, self._engine.ended_in_reasoning
        ):
            result = super()._single_pass_parse(text, token_ids, CONTENT)
        return result

    def _events_to_delta(
        self, events: list[SemanticEvent], finished: bool = False
    ) -> DeltaMessage | None:
        fields: dict[str, Any] = {}
        calls: dict[int, DeltaToolCall] = {}
        for event in events:
            if event.type in _TEXT_FIELDS:
                field = _TEXT_FIELDS[event.type]
                fields[field] = fields.get(field, "") + event.value
            elif event.type is EventType.REASONING_END:
                self._reasoning_ended = True
            elif self._suppress_tool_calls:
                continue
            elif event.type is EventType.TOOL_NAME:
                calls[event.tool_index] = self._begin_call(event.value, event.tool_index)
            elif event.type is EventType.ARG_VALUE_CHUNK:
                self._tool_slots[-1].append_args(event.value)
                call = calls.setdefault(event.tool_index, DeltaToolCall(index=event.tool_index))
                written = call.function or DeltaFunctionCall(arguments="")
                written.arguments = f"{written.arguments}{event.value}"
                call.function = written
        if calls:
            fields["tool_calls"] = list(calls.values())
        return DeltaMessage(**fields) if fields else None

    def _begin_call(self, name: str, index: int) -> DeltaToolCall:
        slot = ToolCallSlot()
        slot.name = name
        self._ensure_tool_id(slot, name)
        self._tool_slots.append(slot)
        function = DeltaFunctionCall(name=name, arguments="")
        return DeltaToolCall(index=index, id=slot.id, type="function", function=function)

    def _build_extracted_result(self, *deltas: DeltaMessage | None) -> ExtractedToolCallInformation:
        content = "".join(delta.content or "" for delta in deltas if delta)
        calls = [
            ToolCall(id=slot.id, function=FunctionCall(name=slot.name, arguments=slot.args))
            for slot in self._tool_slots
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=content or None
        )
