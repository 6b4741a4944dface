# SPDX-License-Identifier: Apache-2.0
"""What needs a server that no other test asks: its counters, and one that sends ten tokens at once.

Its worker has a process of its own, as vLLM does on a CPU unless told otherwise.
"""

import itertools
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
def own_service(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("own-server") / "server.log"
    arguments = (*ARGUMENTS, "--stream-interval=10", "--distributed-executor-backend=mp")
    environment = CPU_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with Server(checkpoint(taught=True), log, arguments, environment) as server:
        yield Service(server.base_url, server.model, taught=True)


def test_ten_tokens_come_at_once(own_service: Service):
    request = own_service.request("storm-direct")
    chunks = list(own_service.openai.chat.completions.create(stream=True, **request))
    assert len(chunks) < 30, "its 189 tokens"


def test_every_scripted_turn_is_answered_word_for_word(own_service: Service):
    def ask(one: Turn) -> list[Answer]:
        return streamed(own_service.openai, **own_service.request(one))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, conversations()))
    for one, (answer,) in zip(conversations(), answers, strict=True):
        own_service.confirm(answer, one)


def test_a_client_that_leaves_stops_its_answer(own_service: Service):
    before = _metric(own_service, "vllm:generation_tokens_total")
    stream = own_service.openai.chat.completions.create(stream=True, **own_service.request("tide"))
    list(itertools.islice(stream, 5))
    stream.close()
    # Nothing tells a client when the engine has dropped its request: look until it has.
    assert any(_metric(own_service, "vllm:num_requests_running") == 0 for _ in range(10_000))
    written = _metric(own_service, "vllm:generation_tokens_total") - before
    assert written < 200, "the answer of 409 tokens was written to its end"
    own_service.confirm(own_service.ask("sum"), "sum")


def _metric(service: Service, name: str) -> float:
    lines = service.http.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))
