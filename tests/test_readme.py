# SPDX-License-Identifier: Apache-2.0
"""Every command that the README and the docs show is one that works; see tests/shown_commands.py."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from harness import __main__ as harness_command
from harness.evidence.environment import Git
from harness.records import store as records
from harness.records.judge import judge
from tests import evidence
from tests.shown_commands import (
    OTHERS,
    REPOSITORY,
    SHELLS,
    Command,
    WrongCommand,
    check,
    fences,
    sessions,
    shown,
)

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
COMMANDS = [command for page in PAGES for command in shown(page)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder that looks like the repository to what is run, and takes what it writes."""
    (tmp_path / "matrices").symlink_to(REPOSITORY / "matrices")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


def write_runs(folder: Path, text: str) -> None:
    """Write a run that passed for each `results/…` in a command, with the cells that it names."""
    words = shlex.split(text)
    cells = [after for word, after in itertools.pairwise(words) if word == "--cell"]
    for name in re.findall(r"results/[^\s/]+", text):
        found = [evidence.record(cell=cell) for cell in cells or ["fp32-alone"]]
        unknown = Git(commit=None, dirty=None)
        environment = found[0].environment.model_copy(update={"git": unknown})
        header = evidence.header(*(record.cell for record in found), environment=environment)
        records.save_header(header, folder / name)
        for record in found:
            judged = record.model_copy(update={"verdict": judge(record)})
            records.save(judged, folder / name)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.where)
def test_a_shown_command_works(command: Command, folder):
    write_runs(folder, command.text)
    try:
        check(command.text)
    except WrongCommand as error:
        pytest.fail(f"{command.where}: {command.text}\n{error}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_it_holds(page):
    unknown = [(line, name) for line, name, _ in fences(page) if name not in SHELLS | OTHERS]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_inline_code_names_sessions_and_commands_that_exist(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"`nox -s (\w+)", text)) <= sessions()
    assert set(re.findall(r"`python -m harness (\w+)", text)) <= set(harness_command.COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(
    "text",
    [
        "make test",
        "nox -s nothing",
        "nox --sessions=tests",
        "nox -s lint -- --fix",
        "nox -s cpu_parity -- --cell nothing",
        "pytest matrices/nothing.yaml",
        "pytest matrices/cpu_parity.yaml --no-such-option",
        "pytest matrices/cpu_parity.yaml -k nothing",
        "pip install 'vllm-metis[tpu]'",
        "pip install something-else",
        "source .venv/bin/activate",
        "pip install -e . --group nothing",
        "vllm serve DIR --no-such-option 1",
        "vllm serve DIR --enable-auto-tool-choice",
        "vllm serve DIR --reasoning-parser nothing",
        "python examples/nothing.py",
        "python -m harness nothing",
        "python -m harness judge",
        "python -m harness report results/RUN --no-such-option",
        "python -m harness judge results/absent",
        "python -m harness list matrices/cpu_parity.yaml --axis dtype=int4",
        "python -m vllm_metis plan --model logos",
        "python -m vllm_metis plan --model logos --gpu-memory 8 --max-model-len 131072",
    ],
)
def test_a_command_that_does_not_work_is_told(text):
    with pytest.raises(WrongCommand):
        check(text)


def test_commands_are_taken_from_shell_blocks_with_their_continuations(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ one \\\n    --more\noutput\n```\n"
        "```text\n$ not a command\n```\n"
        "```bash\n# a comment\ntwo\n```\n"
    )
    found = [(command.where, shlex.split(command.text)) for command in shown(page)]
    assert found == [("page.md:2", ["one", "--more"]), ("page.md:11", ["two"])]
