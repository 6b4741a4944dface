# SPDX-License-Identifier: Apache-2.0
"""Chat requests to an OpenAI server, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai

from harness.serving.answers import Answer, Assembly, answers

TIMEOUT_S = 120.0
"""Longest wait for a piece of a response. On two cores a tiny model answers in 3 s."""


def connect(base_url: str) -> openai.OpenAI:
    """Return a client that neither retries nor waits long: a fault must show.

    Args:
        base_url: the server's, without a path.
    """
    return openai.OpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    )


def connect_async(base_url: str) -> openai.AsyncOpenAI:
    """Return a client like that of `connect`, for up to a thousand requests at once."""
    return openai.AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def whole(client: openai.OpenAI, **request: Any) -> list[Answer]:
    """Ask for a chat completion and return its choices, by index."""
    return answers(client.chat.completions.create(stream=False, **request))


def streamed(client: openai.OpenAI, **request: Any) -> list[Answer]:
    """Ask for a streamed chat completion and return its choices put together, by index.

    Raises:
        ProtocolError: no client could have put them together.
    """
    assembly = Assembly()
    for chunk in client.chat.completions.create(stream=True, **request):
        assembly.add(chunk)
    return assembly.answers()
