# SPDX-License-Identifier: Apache-2.0
"""The `metis` reasoning and tool parsers, as vLLM 0.31's serving layer takes them.

vLLM composes a server's two parsers to one class. By itself that class hands each parser text without
ids and, when it is not streaming, without the prompt; made a `MetisParser`, it reads a turn in one piece.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm import envs
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter
from vllm.parser.metrics import record_tool_parser_invocation
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import Tool
from xgrammar import StructuralTag

from vllm_metis.parser.engine import MetisEngine
from vllm_metis.parser.request import Request
from vllm_metis.parser.tool_grammar import structural_tag
from vllm_metis.parser.workarounds import (
    hide_reasoning_ourselves,
    hides_reasoning,
    refuse_circular_schema,
    say_what_was_called,
    show_prompt,
    tell_other_choices,
    uncounted_if_cut,
)


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

    def get_structural_tag(
        self,
        request: Request,
        *,
        reasoning: bool = False,
        strict_level: ToolStrictLevel = ToolStrictLevel.AUTO,
    ) -> StructuralTag | None:
        if not envs.VLLM_ENFORCE_STRICT_TOOL_CALLING:
            return None
        return structural_tag(request, strict_level, self._parser_engine.marker)


class MetisParser(DelegatingParser):
    """Reads a turn in one piece, with its ids, for whichever of the two parsers the server has."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        tools: list[Tool] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, tools, *args, **kwargs)
        adapter: Any = self._reasoning_parser or self._tool_parser
        self._turn: MetisEngine = adapter._parser_engine
        self._turn.skip_reasoning_parsing = self._reasoning_parser is None
        self._turn.skip_tool_parsing = self._tool_parser is None

    def adjust_request(self, request: Request) -> Request:
        refuse_circular_schema(request)
        request = super().adjust_request(request)
        if self._reasoning_parser is not None:
            hide_reasoning_ourselves(request)
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        if self._reasoning_parser is None:
            return False
        show_prompt(self._turn, input_ids)
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
        if self._turn.knows_its_prompt:
            tell_other_choices(request, self._turn.thinks)
        if enable_auto_tools and self._tool_parser is not None:
            say_what_was_called(request, bool(calls))
        if reasoning and hides_reasoning(request):
            reasoning = None
        if calls:
            ids = model_output_token_ids
            calls = uncounted_if_cut(calls, request, ids, bool(ids) and self._turn.is_end(ids[-1]))
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
        if delta and delta.reasoning and hides_reasoning(request):
            delta.reasoning = None
            if not delta.content and not delta.tool_calls:
                return None
        return delta

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        if self._reasoning_parser is None:
            return 0
        return self._turn.count_reasoning_tokens(token_ids)

    def _record(self, is_tool_called: bool, request: Request, is_streaming: bool) -> None:
        if self._tool_parser is not None:
            record_tool_parser_invocation(
                is_tool_called=is_tool_called, is_streaming=is_streaming, request=request
            )
