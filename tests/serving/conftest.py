# SPDX-License-Identifier: Apache-2.0
"""One server for all serving tests: started here on the taught checkpoint, or any that runs already.

    pytest tests/serving
    pytest tests/serving -n 4 --dist worksteal
    pytest tests/serving --base-url http://HOST:PORT --served-model NAME

Tests marked `taught` know the answers word for word, and are left out for a server that runs already,
unless `--taught` says that it serves the taught checkpoint. The others hold for every Metis-1.6 server.

pytest-xdist's workers share one server, which their controller starts: it answers a batch in little more
time than one request.
"""

import shutil
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.serving.server import Server
from tests.serving.service import ARGUMENTS, Service

_HERE = Path(__file__).parent
_SERVER = pytest.StashKey[Server]()


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


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, in the process that starts the workers
def pytest_configure_node(node: Any) -> None:
    """Name the shared server to a worker; the first to come starts it."""
    config: pytest.Config = node.config
    if config.getoption("--base-url"):
        return
    if _SERVER not in config.stash:
        config.stash[_SERVER] = _started(config)
    node.workerinput["server"] = config.stash[_SERVER].base_url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the shared server said last, where a test failed."""
    server = terminalreporter.config.stash.get(_SERVER, None)
    if server and any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        terminalreporter.section("end of the server's log")
        terminalreporter.write_line(server.tail())


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
    if base_url := getattr(options, "workerinput", {}).get("server"):
        yield Service(base_url, None, taught=True)
        return
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(checkpoint(taught=True), log, ARGUMENTS) as server:
        yield Service(server.base_url, server.model, taught=True)


def _started(config: pytest.Config) -> Server:
    """Return a server of the taught checkpoint, which ends with the run."""
    from harness.checkpoints.write import write_checkpoint  # torch, which no worker needs

    folder = Path(tempfile.mkdtemp(prefix="vllm-metis-serving-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    checkpoint = write_checkpoint(folder / "taught", taught=True)
    server = Server(checkpoint, folder / "server.log", ARGUMENTS)
    config.add_cleanup(server.stop)
    return server.__enter__()
