# SPDX-License-Identifier: Apache-2.0
"""What a client sees of a server: the parts of its answers, and when each stream's tokens came."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.kinds.smoke.observation import (
    FunctionCall,
    ServedAnswer,
    ServedObservation,
    ServedStream,
    TimingObservation,
)
from harness.serving import client
from harness.serving.answers import Answer, ProtocolError

_WITH_USAGE = {"include_usage": True}


class Client:
    """A client of a running server.

    Args:
        base_url: without a path.
        model: the name under which it serves.
    """

    def __init__(self, base_url: str, model: str):
        self._api = client.connect(base_url)
        self._model = model

    def answer(self, chats: Mapping[str, dict[str, Any]], max_tokens: int) -> ServedObservation:
        """Ask for each chat greedily, whole and streamed.

        Args:
            chats: by prompt, with `messages`, `enable_thinking` and perhaps `tools`.
        """
        started = time.monotonic()
        answers = []
        for name, chat in chats.items():
            thinking = {"enable_thinking": chat["enable_thinking"]}
            request: dict[str, Any] = {
                "model": self._model,
                "messages": chat["messages"],
                "temperature": 0.0,
                "max_completion_tokens": max_tokens,
                "extra_body": {"chat_template_kwargs": thinking},
            }
            if chat.get("tools"):
                request["tools"] = chat["tools"]
            (whole,) = client.whole(self._api, **request)
            (streamed,) = client.streamed(self._api, stream_options=_WITH_USAGE, **request)
            answers += [_answer(name, chat, whole, False), _answer(name, chat, streamed, True)]
        return ServedObservation(answers=answers, run_s=time.monotonic() - started)

    def hold_streams(
        self, rounds: Sequence[Sequence[list[int]]], max_tokens: int
    ) -> TimingObservation:
        """Hold the streams of a round open at once, round after round.

        Args:
            rounds: prompts as token ids.
            max_tokens: of each stream, which goes on whatever the model says.
        """
        streams: list[ServedStream] = []
        with ThreadPoolExecutor(max(map(len, rounds))) as clients:
            for number, prompts in enumerate(rounds):
                epoch = time.perf_counter()
                held = [
                    clients.submit(self._hold, ids, max_tokens, number, epoch) for ids in prompts
                ]
                streams += [one.result() for one in held]
        return TimingObservation(streams=streams)

    def _hold(self, ids: list[int], max_tokens: int, number: int, epoch: float) -> ServedStream:
        def now_ms() -> float:
            return 1e3 * (time.perf_counter() - epoch)

        sent_ms = now_ms()
        arrivals_ms = []
        usage = None
        request: dict[str, Any] = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream_options": _WITH_USAGE,
            "extra_body": {"ignore_eos": True},
        }
        for chunk in self._api.completions.create(stream=True, **request):
            usage = chunk.usage or usage
            if chunk.choices:
                arrivals_ms.append(now_ms())
        if usage is None or not arrivals_ms:
            raise ProtocolError("a stream ended without a token, or without its usage")
        return ServedStream(
            round=number,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            sent_ms=sent_ms,
            first_token_ms=arrivals_ms[0],
            last_token_ms=arrivals_ms[-1],
        )


def _answer(name: str, chat: dict[str, Any], answer: Answer, streamed: bool) -> ServedAnswer:
    return ServedAnswer(
        prompt=name,
        streamed=streamed,
        enable_thinking=chat["enable_thinking"],
        tools=chat.get("tools", []),
        after_tool_result=chat["messages"][-1]["role"] == "tool",
        reasoning=answer.reasoning,
        content=answer.content,
        tool_calls=[
            FunctionCall(name=call.name, arguments=call.arguments) for call in answer.tool_calls
        ],
        finish_reason=answer.finish_reason,
        completion_tokens=answer.usage.completion_tokens,
    )
