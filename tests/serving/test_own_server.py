# SPDX-License-Identifier: Apache-2.0
"""A server that sends ten tokens at once says the same as one that sends each by itself.

Its worker has a process of its own, as vLLM does on a CPU unless told otherwise.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.prompts.conversations import Turn, conversations
from harness.serving.answers import Answer
from harness.serving.client import streamed
from harness.serving.server import CPU_ENVIRONMENT, Server
from tests.serving.service import ARGUMENTS, Service

pytestmark = pytest.mark.second_server


@pytest.fixture(scope="module")
def slow_service(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("slow-server") / "server.log"
    arguments = (*ARGUMENTS, "--stream-interval=10", "--distributed-executor-backend=mp")
    environment = CPU_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with Server(checkpoint(taught=True), log, arguments, environment) as server:
        yield Service(server.base_url, server.model, taught=True)


def test_ten_tokens_come_at_once(slow_service: Service):
    request = slow_service.request("storm-direct")
    chunks = list(slow_service.openai.chat.completions.create(stream=True, **request))
    assert len(chunks) < 30, "its 189 tokens"


def test_every_scripted_turn_is_answered_word_for_word(slow_service: Service):
    def ask(one: Turn) -> list[Answer]:
        return streamed(slow_service.openai, **slow_service.request(one))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, conversations()))
    for one, (answer,) in zip(conversations(), answers, strict=True):
        slow_service.confirm(answer, one)
