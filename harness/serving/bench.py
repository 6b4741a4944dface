# SPDX-License-Identifier: Apache-2.0
"""`python -m harness bench parsers`: what streaming costs per token, beside vLLM's qwen3 engine.

Three texts in deltas of one token: reasoning, content, one long string argument. A server asks its
parsers for every token of every request, so the cost of a token must not grow with the output.
Exit codes: 0 within the limits; 1 past one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness import exit_codes

WINDOW = 1000
REPEATS = 5
# Flat code measures 0.9 to 1.1; code that reads an argument again from its start, over 10.
GROWTH_LIMIT = 1.3
# 0.8 to 1.1 on an idle machine.
QWEN3_LIMIT = 1.2
# vLLM's engine reads an argument again from its start with every token: 64k tokens take minutes.
QWEN3_ARGUMENT_TOKENS = 2 * WINDOW

TEXT = "The tide comes in, a < b, and x > y.\nIt is 4 °C in Évora; <b>go</b> on. "
THINKING, DIRECT = "<think>\n", "<think>\n\n</think>\n"
CALL = "<function=write>\n<parameter=text>\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Scenario:
    """A text that is streamed after an opening, the prompt's end telling what it is."""

    name: str
    prompt: str
    opening: str = ""

    @property
    def qwen3_opening(self) -> str:
        return self.opening.replace("<|tool_call|>", "<tool_call>\n")


SCENARIOS = (
    Scenario("reasoning", THINKING),
    Scenario("content", DIRECT),
    Scenario("argument", DIRECT, "<|tool_call|>" + CALL),
)


@dataclass(frozen=True)
class Ratio:
    """One row of the table, in microseconds per token but for the ratio."""

    name: str
    measured_us: float
    beside_us: float
    limit: float

    @property
    def ratio(self) -> float:
        return self.measured_us / self.beside_us

    @property
    def row(self) -> tuple[str, ...]:
        verdict = "pass" if self.ratio <= self.limit else "fail"
        numbers = (f"{self.measured_us:.2f}", f"{self.beside_us:.2f}", f"{self.ratio:.2f}")
        return (self.name, *numbers, f"{self.limit:.2f}", verdict)


class Bench:
    """Streams texts through the parsers as a server composes them.

    Args:
        folder: a checkpoint, for its tokenizer.
        tokens: length of the outputs.
    """

    def __init__(self, folder: Path, tokens: int) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        import vllm_metis
        from harness.checkpoints.tokenizer import read_tokenizer

        vllm_metis.register()
        self._tokens = tokens
        self._tokenizer = get_cached_tokenizer(read_tokenizer(folder))
        self._request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "Go on."}], tools=[TOOL]
        )
        self._metis = ParserManager.get_parser("metis", "metis", enable_auto_tools=True)
        self._text = self._tokenizer.encode(TEXT)
        self._body = list(itertools.islice(itertools.cycle(self._text), tokens))

    def ratios(self, scenario: Scenario) -> list[Ratio]:
        """Measure one scenario; of several runs, interleaved with qwen3's, the best count."""
        prompt = self._tokenizer.encode("<|fim_prefix|>assistant\n" + scenario.prompt)
        beside = QWEN3_ARGUMENT_TOKENS if scenario.opening else self._tokens
        first, last, ours, theirs = [], [], [], []
        for _ in range(REPEATS):
            times = self._stream(self._parser(), scenario.opening, prompt, self._tokens)
            first.append(statistics.fmean(times[:WINDOW]))
            last.append(statistics.fmean(times[-WINDOW:]))
            ours.append(statistics.fmean(times[:beside]))
            qwen3 = self._qwen3(thinks=scenario.prompt == THINKING)
            times = self._stream(qwen3, scenario.qwen3_opening, prompt, beside)
            theirs.append(statistics.fmean(times))
        return [
            Ratio(f"{scenario.name}: last {WINDOW} : first", min(last), min(first), GROWTH_LIMIT),
            Ratio(f"{scenario.name}: metis : qwen3", min(ours), min(theirs), QWEN3_LIMIT),
        ]

    def gate_ratio(self) -> Ratio:
        """Measure how the question whether reasoning ended grows with the output."""
        from vllm_metis.parser.adapters import MetisReasoningParser

        parser = MetisReasoningParser(self._tokenizer)

        def cost_us(length: int) -> float:
            output = self._text * (length // len(self._text))  # so that both end alike
            return _best_us(lambda: parser.is_reasoning_end_streaming(output, output[-1:]))

        name = f"reasoning end: at {self._tokens} : at {WINDOW}"
        return Ratio(name, cost_us(self._tokens), cost_us(WINDOW), GROWTH_LIMIT)

    def _parser(self) -> Any:
        return self._metis(self._tokenizer, self._request.tools, chat_template_kwargs={})

    def _qwen3(self, thinks: bool) -> Any:
        from vllm.parser.qwen3 import Qwen3Parser

        kwargs = {"enable_thinking": thinks}
        return Qwen3Parser(self._tokenizer, self._request.tools, chat_template_kwargs=kwargs)

    def _stream(self, parser: Any, opening: str, prompt: list[int], tokens: int) -> list[float]:
        """Return the microseconds of each token of the text; the opening is not counted."""
        head = self._tokenizer.encode(opening, add_special_tokens=False) if opening else []
        deltas = self._deltas(head + self._body[:tokens])
        parse, request, clock = parser.parse_delta, self._request, time.perf_counter
        times = []
        gc.collect()
        for text, token_ids in deltas:
            start = clock()
            parse(text, token_ids, request, prompt, finished=False)
            times.append((clock() - start) * 1e6)
        return times[len(head) :]

    def _deltas(self, token_ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Return the text of each token as vLLM's detokenizer gives it, unfinished bytes held back."""
        from tokenizers.decoders import DecodeStream

        stream, backend = DecodeStream(skip_special_tokens=False), self._tokenizer._tokenizer
        return [(stream.step(backend, token) or "", [token]) for token in token_ids]


def _best_us(call: Callable[[], object], calls: int = 2000) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness bench parsers`."""
    parser.add_argument("what", choices=("parsers",), help="streaming cost per token")
    parser.add_argument("--tokens", type=int, default=64_000, help="length of the outputs")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint whose tokenizer is used; left out: a tiny one",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, and return the exit code."""
    if args.tokens < QWEN3_ARGUMENT_TOKENS:
        print(f"--tokens is {args.tokens}; at least {QWEN3_ARGUMENT_TOKENS} are compared")
        return exit_codes.USAGE
    # Before vLLM is imported: no device is needed, and its log would stand in the table.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from harness.checkpoints.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        if args.model is None:
            write_tokenizer(Path(scratch), vocab_size=1024)
        bench = Bench(args.model or Path(scratch), args.tokens)
        ratios = [one for scenario in SCENARIOS for one in bench.ratios(scenario)]
        ratios.append(bench.gate_ratio())
    head = ("streaming", "us/token", "beside", "ratio", "limit", "verdict")
    print(tabulate([one.row for one in ratios], head, tablefmt="plain", disable_numparse=True))
    past = any(one.ratio > one.limit for one in ratios)
    return exit_codes.FAILED if past else exit_codes.PASSED
