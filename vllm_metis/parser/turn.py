# SPDX-License-Identifier: Apache-2.0
"""The reader of one turn: sampled tokens in, vLLM's semantic events out.

It stands where `StreamingParserEngine` stands in a vLLM `ParserEngine` and follows a grammar declared
in the same form. It differs where this format does: a marker is found by its place among the ids,
`</think>` is text that shares tokens with its neighbours, and a call's end depends on what its values
hold, which `vllm_metis.parser.call` reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm.parser.engine.events import EventType, SemanticEvent
from vllm.parser.engine.parser_engine_config import ParserEngineConfig, ParserState

from vllm_metis.parser.arguments import Parameters
from vllm_metis.parser.call import Call, Status
from vllm_metis.parser.reasoning import (
    LINE_BREAKS_AFTER_REASONING,
    THINK_END,
    THINK_START,
    THINKING,
    Opening,
    ReasoningEnd,
)
from vllm_metis.parser.tag_beginnings import beginning_finder
from vllm_metis.parser.token_text import TextWithMarkers, TokenTexts

REASONING, CONTENT = ParserState.REASONING, ParserState.CONTENT
CALL, OVER = ParserState.TOOL_ARGS, ParserState.TOOL_BETWEEN

ENDS = ("TURN_END", "TEXT_END")  # terminals
_SPACE = " \t\r\n"
_beginning_of_think_end = beginning_finder(("\n" + THINK_END, THINK_END))


@dataclass(frozen=True)
class Binding:
    """What a grammar binds, which knows special tokens by their spelling: there they are text."""

    content: bool = False  # all of it
    answer: bool = False  # the content, unless calls come instead
    calls: bool = False  # the values of calls that the grammar saw begin


class TurnReader:
    """Reads one turn, delta by delta.

    Args:
        grammar: the declared terminals, states and transitions.
        texts: the text of each token.
        special: the spelling of each special token that the grammar knows, by id.
        parameters_of: gives what the tool of a name declares.
    """

    def __init__(
        self,
        grammar: ParserEngineConfig,
        texts: TokenTexts,
        special: Mapping[int, str],
        parameters_of: Callable[[str], Parameters],
    ) -> None:
        self._transitions = grammar.transitions
        self._texts = texts
        self._special = special
        terminals = {spelling: name for name, spelling in grammar.token_id_terminals.items()}
        self._terminals = {token_id: terminals[text] for token_id, text in special.items()}
        self._marker = next(n for n, name in self._terminals.items() if name == "TOOL_START")
        self._parameters_of = parameters_of
        self._pieces = TextWithMarkers(texts, special)
        self._read_text: dict[ParserState, Callable[[str, list[SemanticEvent]], str]] = {
            REASONING: self._read_reasoning,
            CONTENT: self._read_content,
            CALL: self._read_call,
            OVER: lambda text, events: "",
        }
        self.opening = THINKING
        self.skip_tool_parsing = False  # then calls are content
        self.skip_reasoning_parsing = False  # then a turn starts with content
        self.binding = Binding()
        self.reset()

    def reset(self, initial_state: ParserState | None = None) -> None:
        """Get ready for a turn.

        Args:
            initial_state: where it starts, if not as `opening` says.
        """
        opening = self.opening if initial_state is None else Opening(initial_state)
        if self.skip_reasoning_parsing:
            opening = Opening(CONTENT)
        self.state = opening.state
        self.reasoning_token_count = 0
        self.ended_in_reasoning = False
        self._may_think = opening.may_think
        self._line_breaks = opening.line_breaks
        self._counting = opening.state is REASONING or opening.may_think
        self._reasoning_end = ReasoningEnd(self._texts, self._special.keys(), self._marker)
        self._pieces.reset()
        self._held = ""  # what may be the beginning of a tag
        self._space: list[str] = []  # white space of the content
        self._has_content = False
        self._has_calls = False
        self._call = Call(self._parameters_of)
        self._named = False  # the call's name is passed on
        self._bound = False  # a grammar has seen the call's marker
        self._next: Call | None = None  # after a marker inside a value, which may be a quotation
        self._tool_index = -1

    def feed(self, delta_text: str, delta_token_ids: Sequence[int]) -> list[SemanticEvent]:
        if self._counting:
            self._count(delta_token_ids)
        events: list[SemanticEvent] = []
        for piece in self._pieces.feed(delta_text, delta_token_ids):
            self._read(piece, events)
        return events

    def finish(self) -> list[SemanticEvent]:
        events: list[SemanticEvent] = []
        for piece in self._pieces.finish():
            self._read(piece, events)
        self._close(events, complete=False)
        return events

    def _count(self, token_ids: Sequence[int]) -> None:
        end = self._reasoning_end.first(token_ids)
        self._counting = end is None
        self.reasoning_token_count += len(token_ids) if end is None else end + 1

    def _read(self, piece: str | int, events: list[SemanticEvent]) -> None:
        if isinstance(piece, int):
            self._read_special(piece, events)
            return
        while piece:
            piece = self._read_text[self.state](piece, events)

    def _go(self, terminal: str, events: list[SemanticEvent]) -> None:
        transition = self._transitions[self.state, terminal]
        self.state = transition.next_state
        for kind in transition.events:
            self._emit(kind, "", events)

    def _emit(self, kind: EventType, text: str, events: list[SemanticEvent]) -> None:
        events.append(SemanticEvent(kind, text, self._tool_index))

    def _read_special(self, token_id: int, events: list[SemanticEvent]) -> None:
        terminal = self._terminals[token_id]
        if self._is_text(terminal):
            self._read(self._special[token_id], events)
            return
        if (self.state, terminal) not in self._transitions:
            return  # a special token that means nothing here
        if terminal != "TOOL_START":
            self.ended_in_reasoning = self.state is REASONING
            self._close(events, complete=True)
            self._go(terminal, events)
        elif self.state is CALL and self._call.in_value:
            self._take_back_marker(events)
            self._next = Call(self._parameters_of)
        elif self.skip_tool_parsing:
            if self.state is REASONING:
                self._leave_reasoning(events)
                self._go("THINK_END", events)
            self._read(self._special[token_id], events)
        else:
            self._bound = self.binding.calls and self.state is not REASONING
            if self.state is REASONING:
                self._leave_reasoning(events)
            elif self.state is CALL:
                self._end_call(events, complete=True)
            self._go(terminal, events)
            self._call, self._named = Call(self._parameters_of), False

    def _is_text(self, terminal: str) -> bool:
        """Whether a grammar takes the special token for its spelling here; the turn's ends it never does."""
        if terminal in ENDS:
            return False
        if self.state is CALL:
            return self._bound and self._call.in_value and not self._call.may_be_over
        bound = self.binding.content or (self.binding.answer and self._has_content)
        return self.state is CONTENT and bound

    def _close(self, events: list[SemanticEvent], complete: bool) -> None:
        """Pass on what is held back: the turn is over, or was cut if it is not complete."""
        if self.state is CALL:
            self._end_call(events, complete)
        if self.state is REASONING:
            # At a cut, what may be the beginning of </think> is taken for it.
            self._leave_reasoning(events, self._held if complete else "")
        elif rest := "" if self._has_calls else "".join(self._space) + self._held:
            self._emit(EventType.TEXT_CHUNK, rest, events)
        self._held = ""
        self._space.clear()

    # Reasoning

    def _read_reasoning(self, text: str, events: list[SemanticEvent]) -> str:
        text = self._held + self._without_line_breaks(text)
        end = text.find(THINK_END)
        if end < 0:
            kept = len(text) - _beginning_of_think_end(text)
            self._held = text[kept:]
            if kept:
                self._emit(EventType.REASONING_CHUNK, text[:kept], events)
            return ""
        self._leave_reasoning(events, text[:end])
        self._go("THINK_END", events)
        self._line_breaks = LINE_BREAKS_AFTER_REASONING
        text = text[end + len(THINK_END) :]
        return text.removeprefix(self._reasoning_end.glued) if self.binding.content else text

    def _leave_reasoning(self, events: list[SemanticEvent], rest: str | None = None) -> None:
        rest = self._held if rest is None else rest
        self._held = ""
        if rest := rest.removesuffix("\n"):
            self._emit(EventType.REASONING_CHUNK, rest, events)

    # Content

    def _read_content(self, text: str, events: list[SemanticEvent]) -> str:
        text = self._held + self._without_line_breaks(text)
        self._held = ""
        said = text.rstrip(_SPACE)
        if not said:
            self._space.append(text)
            return ""
        if self._may_think:
            start = text.lstrip(_SPACE)
            if start != THINK_START and THINK_START.startswith(start):
                self._held = text
                return ""
            self._may_think = False
            if start.startswith(THINK_START):
                self._space.clear()
                self._line_breaks = 1
                self._go("THINK_START", events)
                return start[len(THINK_START) :]
            self._counting, self.reasoning_token_count = False, 0
        # White space belongs to the content only if more content follows, or no call does.
        self._emit(EventType.TEXT_CHUNK, "".join(self._space) + said, events)
        self._space = [text[len(said) :]]
        self._has_content = True
        return ""

    def _without_line_breaks(self, text: str) -> str:
        while self._line_breaks and text:
            if text[0] != "\n":
                self._line_breaks = 0
                break
            self._line_breaks -= 1
            text = text[1:]
        return text

    # Calls

    def _read_call(self, text: str, events: list[SemanticEvent]) -> str:
        if self._next:
            fragment = self._next.feed(text)
            if self._next.status is Status.UNNAMED:
                return ""
            if self._next.status is Status.REFUSED:
                self._take_back_marker(events)
                return ""
            self._end_call(events, complete=True)
            self._go("TOOL_START", events)
            self._call, self._next = self._next, None
            self._report(fragment, events)
        else:
            self._report(self._call.feed(text), events)
        if self._call.status is Status.CLOSED:
            self._end_call(events, complete=True)
        elif self._call.status is Status.REFUSED:
            self._go("FUNC_END", events)
            return self._call.rest
        return ""

    def _report(self, fragment: str, events: list[SemanticEvent]) -> None:
        if self._call.name and not self._named:
            self._named = self._has_calls = True
            self._tool_index += 1
            self._emit(EventType.TOOL_NAME, self._call.name, events)
        if fragment:
            self._emit(EventType.ARG_VALUE_CHUNK, fragment, events)

    def _end_call(self, events: list[SemanticEvent], complete: bool) -> None:
        self._report(self._call.close(complete), events)
        if self._named:
            self._emit(EventType.TOOL_CALL_END, "", events)
        self._named = False
        self._go("FUNC_END", events)
        if not self._has_content:
            self._space.clear()
            self._line_breaks = LINE_BREAKS_AFTER_REASONING
        self._read(self._call.rest, events)

    def _take_back_marker(self, events: list[SemanticEvent]) -> None:
        """Give a marker that no call follows to the value in which it stands."""
        if self._next:
            quoted = self._special[self._marker] + self._next.unread
            self._next = None
            self._read(quoted, events)
