# SPDX-License-Identifier: Apache-2.0
"""Replay parser cases of a YAML file through vLLM's chat serving, whole and in every delta size.

A file is a list of cases. Read of each are
  id, kind          parser_whole and parser_stream are run alike; server needs a running server, and is not
  tools             of the request
  request           thinking: whether the prompt ends inside the think block (default true)
                    parsers: both (default), reasoning_only or tool_only
                    prompt_tail: the prompt's end, where another template wrote it
                    anything else: a field of the chat completion request
  model_output      what the model wrote; <|fim_suffix|> and the like are tokens
  plain_text_spans  what in it only spells such tokens
  expected          reasoning, content, tool_calls; where given, finish_reason, no_whitespace_only_content,
                    and min_arg_chunks for deltas of one token
  accept_also       other right answers
  compare           exact (default), or "content stripped"
and other keys are notes. Exit codes: 0 all passed; 1 one failed; 2 malformed file; 4 no case ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness import exit_codes
from harness.strict_yaml import StrictModel, YamlError, load

if TYPE_CHECKING:
    from harness.serving.answers import Answer
    from harness.serving.replay import ScriptedEngine

DELTA_SIZES = {"whole": 0, "1": 1, "2": 2, "3": 3, "7": 7, "all": 1 << 30}
PARSERS = {"both": ("metis", "metis"), "reasoning_only": ("metis", ""), "tool_only": ("", "metis")}


class ExpectedCall(StrictModel):
    """A call that must come, its arguments parsed."""

    name: str
    arguments: dict[str, Any]


class Checks(StrictModel):
    """What else must hold of an answer."""

    finish_reason: str | None = None
    min_arg_chunks: int = 0  # in deltas of one token
    no_whitespace_only_content: bool = False
    checks: list[str] = []


class Outcome(Checks):
    """An answer that must come."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ExpectedCall]


class ServerOutcome(Checks):
    """What is written down of an answer that only a server can give."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ExpectedCall] = []


class _Noted(BaseModel):
    """A mapping in which other keys are notes, or fields of vLLM's own."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class CaseRequest(_Noted):
    """The request of a case; all other keys are fields of a chat completion request."""

    thinking: bool = True
    parsers: Literal["both", "reasoning_only", "tool_only"] = "both"
    prompt_tail: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the chat completion request."""
        return dict(self.model_extra or {})


class Case(_Noted):
    """A case that is replayed."""

    id: str
    kind: Literal["parser_whole", "parser_stream"]
    tools: list[dict[str, Any]] | None = None
    request: CaseRequest
    model_output: Annotated[str, Field(min_length=1)]
    plain_text_spans: list[Annotated[str, Field(min_length=1)]] = []
    expected: Outcome
    accept_also: list[Outcome] = []
    compare: Literal["exact", "content stripped"] = "exact"


class ServerCase(_Noted):
    """A case that needs a running server."""

    id: str
    kind: Literal["server"]
    tools: list[dict[str, Any]] | None = None
    request: dict[str, Any]
    model_output: str | None = None
    expected: ServerOutcome
    accept_also: list[ServerOutcome] = []


_Cases = Annotated[
    list[Annotated[Case | ServerCase, Field(discriminator="kind")]], Field(min_length=1)
]


def load_cases(path: Path) -> list[Case | ServerCase]:
    """Read the cases of a file.

    Raises:
        YamlError: with every fault of the file as `file:line: fault`.
    """
    cases: list[Case | ServerCase] = load(path).read(_Cases)
    return cases


@dataclass(frozen=True)
class Mismatch:
    """One way in which a case failed, and the deliveries in which it did."""

    deliveries: tuple[str, ...]
    reason: str
    got: dict[str, Any] | None = None


class CaseRunner:
    """Replays cases with the tokenizer and the chat template of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        from harness.serving.replay import Replay, ScriptedEngine

        self._engine: ScriptedEngine = ScriptedEngine(checkpoint)
        self._replays = {name: Replay(self._engine, *pair) for name, pair in PARSERS.items()}

    def mismatches(self, case: Case) -> list[Mismatch]:
        """Return how the case fails; nothing if it passes."""
        from harness.serving.replay import ReplayError

        replay = self._replays[case.request.parsers]
        script = [list(self._encode(case.model_output, case.plain_text_spans))]
        body = self._body(case.request, case.tools)
        reasons: dict[str, tuple[str, dict[str, Any] | None]] = {}
        whole = None
        for delivery, delta_size in DELTA_SIZES.items():
            try:
                (answer,) = replay.answers(body, script, delta_size)
            except ReplayError as error:
                reasons[delivery] = str(error), None
                continue
            whole = whole or answer.outcome
            if reason := _mismatch(case, answer, delivery):
                reasons[delivery] = reason, answer.said
            elif answer.outcome != whole:
                reasons[delivery] = "streamed is not what whole is", answer.said
        return [
            Mismatch(tuple(d for d in reasons if reasons[d] == reason), *reason)
            for reason in {json.dumps(reason): reason for reason in reasons.values()}.values()
        ]

    def _encode(self, text: str, plain_text_spans: list[str]) -> Iterator[int]:
        """Yield the tokens of the text; the spans are spelled with ordinary ones."""
        tokenizer = self._engine.tokenizer
        spans = "|".join(map(re.escape, plain_text_spans))
        for part in re.split(f"({spans})", text) if spans else [text]:
            yield from tokenizer.encode(
                part, add_special_tokens=False, split_special_tokens=part in plain_text_spans
            )

    @staticmethod
    def _body(request: CaseRequest, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Go on."}], **request.fields}
        body.pop("stream", None)
        tail = request.prompt_tail
        if not request.thinking:
            body.setdefault("chat_template_kwargs", {"enable_thinking": False})
        if tail is not None:
            body["chat_template"] = "{{ " + json.dumps(f"<|fim_prefix|>assistant\n{tail}") + " }}"
        if tools:
            body["tools"] = tools
        return body


def _mismatch(case: Case, answer: Answer, delivery: str) -> str | None:
    """Return why the answer is not one that the case asks for, None if it is."""
    reasons = [
        _difference(case, expected, answer, delivery)
        for expected in [case.expected, *case.accept_also]
    ]
    return None if None in reasons else reasons[0]


def _difference(case: Case, expected: Outcome, answer: Answer, delivery: str) -> str | None:
    if (answer.reasoning or None) != expected.reasoning:
        return "the reasoning differs"
    contents = [answer.content or None, expected.content]
    if case.compare == "content stripped":
        contents = [content and content.strip() for content in contents]
    if contents[0] != contents[1]:
        return "the content differs"
    try:
        calls = [ExpectedCall(name=one.name, arguments=one.parsed()) for one in answer.tool_calls]
    except ValueError:
        return "the arguments of a call are not a JSON object"
    if calls != expected.tool_calls:
        return "the calls differ"
    if expected.finish_reason not in (None, answer.finish_reason):
        return f"finish_reason is {answer.finish_reason}"
    if expected.no_whitespace_only_content and not all(
        piece.strip() for piece in answer.content_pieces
    ):
        return "a piece of content is white space alone"
    pieces = min((len(call.fragments) for call in answer.tool_calls), default=0)
    if delivery == "1" and pieces < expected.min_arg_chunks:
        return f"the arguments came in {pieces} pieces"
    return None


def _unknown_fields(cases: list[Case | ServerCase]) -> list[str]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    known = set(ChatCompletionRequest.model_fields)
    return [
        f"{case.id}: request.{name} is no field of a chat completion request"
        for case in cases
        if isinstance(case, Case)
        for name in sorted(case.request.fields.keys() - known)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the cases")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint whose tokenizer and chat template are used; left out: a tiny one",
    )


def run(args: argparse.Namespace) -> int:
    """Print a verdict per case, and return the exit code."""
    # Before vLLM is imported: no device is needed, and its log would stand among the verdicts.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        cases = load_cases(args.file)
    except YamlError as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    if faults := _unknown_fields(cases):
        print("\n".join(faults), file=sys.stderr)
        return exit_codes.USAGE
    with tempfile.TemporaryDirectory() as scratch:
        runner = CaseRunner(args.model or _tiny_checkpoint(Path(scratch)))
        verdicts = [_report(runner, case) for case in cases]
    counts = {verdict: verdicts.count(verdict) for verdict in ("pass", "fail", "not run")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return exit_codes.of_verdicts(verdict for verdict in verdicts if verdict != "not run")


def _report(runner: CaseRunner, case: Case | ServerCase) -> str:
    if isinstance(case, ServerCase):
        print(f"not run  {case.id}: it needs a running server")
        return "not run"
    mismatches = runner.mismatches(case)
    verdict = "fail" if mismatches else "pass"
    print(f"{verdict:7}  {case.id}")
    for mismatch in mismatches:
        print(f"         {', '.join(mismatch.deliveries)}: {mismatch.reason}")
        expected = case.expected.model_dump(exclude_unset=True)
        print(f"           expected {json.dumps(expected, ensure_ascii=False)}")
        if mismatch.got is not None:
            print(f"           got      {json.dumps(mismatch.got, ensure_ascii=False)}")
    return verdict


def _tiny_checkpoint(folder: Path) -> Path:
    from harness.checkpoints.write import write_checkpoint

    return write_checkpoint(folder / "tiny")
