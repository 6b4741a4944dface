# SPDX-License-Identifier: Apache-2.0
"""The `metis` reasoning and tool parsers, as vLLM 0.31's serving layer takes them.

vLLM composes a server's two parsers to one class. By itself that class hands each parser text without
ids and, when it is not streaming, without the prompt; made a `MetisParser`, it reads a turn in one piece.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from vllm import envs
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter
from vllm.parser.metrics import record_tool_parser_invocation
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from vllm_metis.parser.engine import MetisEngine
from vllm_metis.parser.schema import is_circular
from vllm_metis.parser.tool_grammar import structural_tag

Request = ChatCompletionRequest | ResponsesRequest

_HIDES_REASONING = "metis_hides_reasoning"  # an extra field of the request object


class _Composable(type):
    """Makes the class that vLLM composes of `metis` parsers a `MetisParser`.

    vLLM names the two in the body of a `DelegatingParser` subclass, and Python tells what is named in
    a class body so (`__set_name__`). With another parser beside it, a parser stays an adapter.
    """

    def __set_name__(cls, owner: Any, name: str) -> None:
        if DelegatingParser not in owner.__bases__:
            return
        parsers = (owner.reasoning_parser_cls, owner.tool_parser_cls)
        if all(parser is None or isinstance(parser, _Composable) for parser in parsers):
            owner.__bases__ = tuple(
                MetisParser if base is DelegatingParser else base for base in owner.__bases__
            )


class MetisReasoningParser(ParserEngineReasoningAdapter, metaclass=_Composable):
    """`--reasoning-parser metis`."""

    _parser_engine: MetisEngine
    _parser_engine_cls = MetisEngine

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return self._parser_engine.is_reasoning_end(input_ids)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        return self._parser_engine.is_reasoning_end_streaming(input_ids, list(delta_ids))


class MetisToolParser(ParserEngineToolAdapter, metaclass=_Composable):
    """`--tool-call-parser metis`."""

    _parser_engine: MetisEngine
    _parser_engine_cls = MetisEngine
    structural_tag_model = "metis"
    # Forced calls come in the model's own format, never as vLLM's JSON list.
    supports_required_and_named = False

    def adjust_request(self, request: Request) -> Request:
        return self._parser_engine.adjust_request(request)

    def get_structural_tag(self, request, *, reasoning=False, strict_level=ToolStrictLevel.AUTO):
        if not envs.VLLM_ENFORCE_STRICT_TOOL_CALLING:
            return None
        return structural_tag(request, strict_level, self._parser_engine.marker)


class MetisParser(DelegatingParser):
    """Reads a turn in one piece, with its ids, for whichever of the two parsers the server has."""

    def __init__(self, tokenizer, tools=None, *args, **kwargs) -> None:
        super().__init__(tokenizer, tools, *args, **kwargs)
        adapter: Any = self._reasoning_parser or self._tool_parser
        self._turn: MetisEngine = adapter._parser_engine
        self._turn.skip_reasoning_parsing = self._reasoning_parser is None
        self._turn.skip_tool_parsing = self._tool_parser is None

    def adjust_request(self, request: Request) -> Request:
        _refuse_circular_schema(request)
        request = super().adjust_request(request)
        if self._reasoning_parser is not None:
            _hide_reasoning_ourselves(request)
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """As in `DelegatingParser`; when not streaming, vLLM shows the prompt here alone."""
        if self._reasoning_parser is None:
            return False
        self._turn.read_prompt(input_ids)
        return self._turn.is_reasoning_end(input_ids)

    def parse(
        self,
        model_output: str,
        request: Request,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        reasoning, content, calls = self._turn.parse(
            model_output, request, enable_auto_tools, model_output_token_ids
        )
        self._record(bool(calls), request, is_streaming=False)
        self._tell_other_choices(request)
        if enable_auto_tools and self._tool_parser is not None:
            _say_what_was_called(request, bool(calls))
        if reasoning and _hides_reasoning(request):
            reasoning = None
        if calls and self._was_cut(request, model_output_token_ids):
            calls = _CutCalls(calls)
        return reasoning, content, calls

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Request,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        delta = self._turn.parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        self._record(bool(delta and delta.tool_calls), request, is_streaming=True)
        if delta and delta.reasoning and _hides_reasoning(request):
            delta.reasoning = None
            if not delta.content and not delta.tool_calls:
                return None
        return delta

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        if self._reasoning_parser is None:
            return 0
        return self._turn.count_reasoning_tokens(token_ids)

    def _was_cut(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Whether a limit ended the output, neither the model nor a stop of the request's own."""
        if not token_ids or self._turn.is_end(token_ids[-1]):
            return False
        fields = vars(request)
        if not (fields.get("stop") or fields.get("stop_token_ids")):
            return True
        limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        return len(token_ids) in {fields.get(limit) for limit in limits}

    def _record(self, is_tool_called: bool, request: Request, is_streaming: bool) -> None:
        if self._tool_parser is not None:
            record_tool_parser_invocation(
                is_tool_called=is_tool_called, is_streaming=is_streaming, request=request
            )

    def _tell_other_choices(self, request: Request) -> None:
        """Pass on what the prompt told: vLLM shows it to the parser of the first choice only."""
        if isinstance(request, ChatCompletionRequest) and self._turn.knows_its_prompt:
            request.chat_template_kwargs = {
                **(request.chat_template_kwargs or {}),
                "enable_thinking": self._turn.thinks,
            }


class _CutCalls(list[FunctionCall]):
    """The calls of a turn that was cut.

    vLLM's full response says finish_reason "tool_calls" where `len(calls) > 0`, also of a turn that
    max_tokens cut (vllm-project/vllm#53269); it then lists the calls by iterating over them.
    """

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


def _refuse_circular_schema(request: Request) -> None:
    """Refuse a schema that the engine would fail to compile as if that were a fault of the server.

    Raises:
        VLLMValidationError: see vllm-project/vllm#57725.
    """
    constraint = request.extract_structured_outputs()
    schema = constraint.json if constraint else None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return  # vLLM says so itself
    if is_circular(schema):
        field = "text" if isinstance(request, ResponsesRequest) else "response_format"
        raise VLLMValidationError(
            "the JSON schema's references lead back to themselves, so that nothing fits it",
            parameter=field,
        )


def _say_what_was_called(request: Request, called: bool) -> None:
    """Let vLLM build its full response from what was written, as it does where calls are free.

    Of a required call it would say finish_reason "tool_calls" also where a stop string came before any
    (vllm-project/vllm#53255), with an empty text for the content. It reads the request after this.
    """
    if not isinstance(request, ChatCompletionRequest) or request.tool_choice != "required":
        return
    if request.tools:
        request.tool_choice = "auto"
    elif not called:  # the Messages API lets a client force a call without tools
        request.tool_choice = "none"


def _hide_reasoning_ourselves(request: Request) -> None:
    """Take `include_reasoning: false` over from vLLM.

    It would take the turn for one without reasoning: a grammar would bind the thinking too, and the
    parser would not be shown the prompt. Where token ids or logprobs are asked for, vLLM has to know
    that they must not tell the reasoning, so there it keeps its way.
    """
    if isinstance(request, ChatCompletionRequest) and not (
        request.include_reasoning or request.logprobs or request.return_token_ids
    ):
        request.include_reasoning = True
        setattr(request, _HIDES_REASONING, True)


def _hides_reasoning(request: Request) -> bool:
    # Much faster than to ask the object for a field that it nearly never has.
    extra = getattr(request, "model_extra", None)
    return extra is not None and extra.get(_HIDES_REASONING) is True
