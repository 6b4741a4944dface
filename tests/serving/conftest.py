# SPDX-License-Identifier: Apache-2.0
"""One server for all serving tests: started here on the taught checkpoint, or any that runs already.

    pytest tests/serving
    pytest tests/serving --base-url http://HOST:PORT --served-model NAME

Tests marked `taught` know the answers word for word, and are left out for a server that runs already,
unless `--taught` says that it serves the taught checkpoint. The others hold for every Metis-1.6 server.
"""

import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.serving.server import Server
from tests.serving.service import ARGUMENTS, Service

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("serving")
    group.addoption("--base-url", help="test the server at this URL instead of starting one")
    group.addoption("--served-model", help="its model; left out, the first that it lists")
    group.addoption(
        "--taught", action="store_true", help="it serves the taught checkpoint in float32"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "taught: needs the taught checkpoint's known answers")
    config.addinivalue_line("markers", "second_server: starts a server of its own")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--base-url", None):
        return
    needless = ["second_server"] if config.getoption("--taught") else ["taught", "second_server"]
    left_out = [
        item
        for item in items
        if _HERE in item.path.parents and any(item.get_closest_marker(one) for one in needless)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def service(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """The server under test."""
    options = request.config
    if base_url := options.getoption("--base-url", None):
        address = urllib.parse.urlsplit(base_url)
        root = f"{address.scheme}://{address.netloc}"
        yield Service(root, options.getoption("--served-model"), options.getoption("--taught"))
        return
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(checkpoint(taught=True), log, ARGUMENTS) as server:
        yield Service(server.base_url, server.model, taught=True)
