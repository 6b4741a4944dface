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
from typing import TYPE_CHECKING, Any

from harness.strict_yaml import MatrixError, load

if TYPE_CHECKING:
    from harness.replay import Answer, ScriptedEngine

DELTA_SIZES = {"whole": 0, "1": 1, "2": 2, "3": 3, "7": 7, "all": 1 << 30}
PARSERS = {"both": ("metis", "metis"), "reasoning_only": ("metis", ""), "tool_only": ("", "metis")}

_TEXT = {"type": ["string", "null"]}
_OUTCOME = {
    "type": "object",
    "properties": {
        "reasoning": _TEXT,
        "content": _TEXT,
        "tool_calls": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            },
        },
        "finish_reason": {"type": "string"},
        "min_arg_chunks": {"type": "integer"},  # in deltas of one token
        "no_whitespace_only_content": {"type": "boolean"},
        "checks": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
_REPLAYED_OUTCOME = {"required": ["reasoning", "content", "tool_calls"]}
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "kind": {"enum": ["parser_whole", "parser_stream", "server"]},
            "tools": {"type": ["array", "null"], "items": {"type": "object"}},
            "request": {"type": "object"},
            "model_output": _TEXT,
            "plain_text_spans": {"type": "array", "items": {"type": "string", "minLength": 1}},
            "expected": _OUTCOME,
            "accept_also": {"type": "array", "items": _OUTCOME},
            "compare": {"enum": ["exact", "content stripped"]},
        },
        "required": ["id", "kind", "request", "expected"],
        "if": {"properties": {"kind": {"const": "server"}}},
        "else": {
            "properties": {
                "request": {
                    "properties": {
                        "thinking": {"type": "boolean"},
                        "parsers": {"enum": list(PARSERS)},
                        "prompt_tail": {"type": "string"},
                    },
                },
                "model_output": {"type": "string", "minLength": 1},
                "expected": _REPLAYED_OUTCOME,
                "accept_also": {"items": _REPLAYED_OUTCOME},
            },
            "required": ["model_output"],
        },
    },
}


@dataclass(frozen=True)
class Failure:
    """One way in which a case failed, and the deliveries in which it did."""

    deliveries: tuple[str, ...]
    reason: str
    got: dict[str, Any] | None = None


class CaseRunner:
    """Replays cases with the tokenizer and the chat template of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        from harness.replay import Replay, ScriptedEngine

        self._engine: ScriptedEngine = ScriptedEngine(checkpoint)
        self._replays = {name: Replay(self._engine, *pair) for name, pair in PARSERS.items()}

    def failures(self, case: dict[str, Any]) -> list[Failure]:
        """Return how the case fails; nothing if it passes."""
        from harness.replay import ReplayError

        request = dict(case["request"])
        replay = self._replays[request.pop("parsers", "both")]
        script = [list(self._encode(case["model_output"], case.get("plain_text_spans", [])))]
        body = self._body(request, case.get("tools"))
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
                reasons[delivery] = reason, answer.outcome
            elif answer.outcome != whole:
                reasons[delivery] = "streamed is not what whole is", answer.outcome
        return [
            Failure(tuple(d for d in reasons if reasons[d] == reason), *reason)
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
    def _body(request: dict[str, Any], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Go on."}], **request}
        body.pop("stream", None)
        thinking, tail = body.pop("thinking", True), body.pop("prompt_tail", None)
        if not thinking:
            body.setdefault("chat_template_kwargs", {"enable_thinking": False})
        if tail is not None:
            body["chat_template"] = "{{ " + json.dumps(f"<|fim_prefix|>assistant\n{tail}") + " }}"
        if tools:
            body["tools"] = tools
        return body


def _mismatch(case: dict[str, Any], answer: Answer, delivery: str) -> str | None:
    """Return why the answer is not one that the case asks for, None if it is."""
    reasons = [
        _difference(case, expected, answer, delivery)
        for expected in [case["expected"], *case.get("accept_also", [])]
    ]
    return None if None in reasons else reasons[0]


def _difference(
    case: dict[str, Any], expected: dict[str, Any], answer: Answer, delivery: str
) -> str | None:
    got = answer.outcome
    if (answer.reasoning or None) != expected["reasoning"]:
        return "the reasoning differs"
    contents = [answer.content or None, expected["content"]]
    if case.get("compare") == "content stripped":
        contents = [content and content.strip() for content in contents]
    if contents[0] != contents[1]:
        return "the content differs"
    try:
        calls = [{"name": n, "arguments": json.loads(a)} for n, a in got["tool_calls"]]
    except ValueError:
        return "the arguments of a call are not JSON"
    if calls != expected["tool_calls"]:
        return "the calls differ"
    if got["finish_reason"] != expected.get("finish_reason", got["finish_reason"]):
        return f"finish_reason is {got['finish_reason']}"
    if expected.get("no_whitespace_only_content") and not all(
        piece.strip() for piece in answer.content_pieces
    ):
        return "a piece of content is white space alone"
    pieces = min((len(call.fragments) for call in answer.calls), default=0)
    if delivery == "1" and pieces < expected.get("min_arg_chunks", 0):
        return f"the arguments came in {pieces} pieces"
    return None


def _unknown_fields(cases: list[dict[str, Any]]) -> list[str]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    known = {*ChatCompletionRequest.model_fields, "thinking", "parsers", "prompt_tail"}
    return [
        f"{case['id']}: request.{name} is no field of a chat completion request"
        for case in cases
        for name in sorted(set(case["request"]) - known)
        if case["kind"] != "server"
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
        cases = load(args.file, SCHEMA).data
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 2
    if faults := _unknown_fields(cases):
        print("\n".join(faults), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        runner = CaseRunner(args.model or _tiny_checkpoint(Path(scratch)))
        verdicts = [_report(runner, case) for case in cases]
    counts = {verdict: verdicts.count(verdict) for verdict in ("pass", "fail", "not run")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    if counts["fail"]:
        return 1
    return 0 if counts["pass"] else 4


def _report(runner: CaseRunner, case: dict[str, Any]) -> str:
    if case["kind"] == "server":
        print(f"not run  {case['id']}: it needs a running server")
        return "not run"
    failures = runner.failures(case)
    verdict = "fail" if failures else "pass"
    print(f"{verdict:7}  {case['id']}")
    for failure in failures:
        print(f"         {', '.join(failure.deliveries)}: {failure.reason}")
        print(f"           expected {json.dumps(case['expected'], ensure_ascii=False)}")
        if failure.got is not None:
            print(f"           got      {json.dumps(failure.got, ensure_ascii=False)}")
    return verdict


def _tiny_checkpoint(folder: Path) -> Path:
    from harness.checkpoint import write_checkpoint

    return write_checkpoint(folder / "tiny")
