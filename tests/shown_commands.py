# SPDX-License-Identifier: Apache-2.0
"""The commands that a Markdown page shows, and for each form of command what says it would work.

A command is a line of a fenced `console` block with the prompt `$ `, or any line of a `bash` block;
`\\` at the end goes on with the next line. It is taken apart by what would take it apart when
typed: its own argument parser, pytest's collection, vLLM's command line. What takes no engine and
seconds is run. A form that no check knows is wrong, so that nothing is shown unchecked.
"""

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from packaging.requirements import Requirement

from harness import __main__ as harness_command
from vllm_metis import __main__ as metis_command

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
SHELLS, OTHERS = {"console", "bash"}, {"text", "yaml", "json", "python"}
OTHER_PACKAGES = {"nox"}
RUN = ("list", "judge", "compare", "report", "plan")
"""Subcommands that are run, and must succeed, unless they name what only the reader has."""

SESSION_ENDS_IN = {
    "tests": "pytest tests",
    "serve_smoke": "pytest tests/serving",
    "judge": "python -m harness judge",
}
"""What `nox -s NAME -- ARGUMENTS` adds its arguments to; a matrix's session runs the matrix."""


class WrongCommand(Exception):
    """A command would not work; the message says why."""


@dataclass(frozen=True)
class Command:
    """A command as shown, and where: `README.md:12`."""

    where: str
    text: str


def fences(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Number of the opening line, language and inner lines of each fenced block."""
    lines = page.read_text(encoding="utf-8").splitlines()
    marks = [number for number, line in enumerate(lines) if line.lstrip().startswith("```")]
    if len(marks) % 2:
        raise ValueError(f"{page.name}:{marks[-1] + 1}: this fence is not closed")
    for first, last in zip(marks[::2], marks[1::2], strict=True):
        yield first + 1, lines[first].strip().removeprefix("```"), lines[first + 1 : last]


def shown(page: Path) -> Iterator[Command]:
    """The commands of a page."""
    for number, language, lines in fences(page):
        if language not in SHELLS:
            continue
        joined, begins = "", 0
        for offset, line in enumerate(lines, start=1):
            begins = begins if joined else number + offset
            joined += line.removesuffix("\\") if line.endswith("\\") else f"{line}\n"
            if line.endswith("\\"):
                continue
            is_command = joined.startswith("$ ") if language == "console" else bool(joined.strip())
            text = joined.removeprefix("$ ").strip()
            if is_command and not text.startswith("#"):
                yield Command(f"{page.name}:{begins}", text)
            joined = ""


def sessions() -> set[str]:
    """noxfile.py's sessions, read without nox, which the tests' environment does not have."""
    tree = ast.parse((REPOSITORY / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        if any("nox.session" in ast.unparse(decorator) for decorator in function.decorator_list)
    }


def check(text: str) -> None:
    """Raise `WrongCommand` where a command would not work at the root of the repository.

    What is run runs in the current folder, where `matrices` and the runs that it names must be.
    """
    words = shlex.split(text)
    while words and re.fullmatch(r"[A-Z][A-Z_]*=.*", words[0]):
        words.pop(0)
    for form, checked in FORMS.items():
        beginning = form.split()
        if words[: len(beginning)] == beginning:
            _check_paths(words)
            return checked(words[len(beginning) :])
    raise WrongCommand(f"no check knows this form of command; known: {', '.join(FORMS)}")


def _check_paths(words: Sequence[str]) -> None:
    for word in words:
        path = word.partition("::")[0]
        ours = path.startswith(("matrices/", "tests/", "harness/", "docs/"))
        if ours and not (REPOSITORY / path).exists():
            raise WrongCommand(f"{path} is not there")


def _check_nox(words: list[str]) -> None:
    own, more = words, []
    if "--" in words:
        own, more = words[: words.index("--")], words[words.index("--") + 1 :]
    if own in ([], ["--list"]):
        return
    if len(own) < 2 or own[0] not in ("-s", "-t"):
        raise WrongCommand("expected nox, nox --list, nox -s NAME … or nox -t TAG")
    known = sessions()
    if own[0] == "-s" and (unknown := sorted(set(own[1:]) - known)):
        raise WrongCommand(f"no session {', '.join(unknown)} in noxfile.py; {sorted(known)} are")
    if more:
        matrix = f"matrices/{own[1]}.yaml"
        ends_in = f"pytest {matrix}" if (REPOSITORY / matrix).exists() else None
        ends_in = SESSION_ENDS_IN.get(own[1], ends_in)
        if ends_in is None:
            raise WrongCommand(f"what session {own[1]} does with arguments is not known here")
        check(f"{ends_in} {shlex.join(more)}")


def _check_pytest(words: list[str]) -> None:
    dry = ("--collect-only", "-q", f"--junitxml={Path.cwd() / 'cells.xml'}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *dry],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WrongCommand(f"pytest collects nothing:\n{done.stdout}{done.stderr}")


def _check_pip(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requirements", nargs="*")
    parser.add_argument("-e", "--editable", action="append", default=[])
    parser.add_argument("--group", action="append", default=[])
    with _exits_are_wrong():
        asked = parser.parse_args(words)
        # A dot stands for this package, the extras after it too.
        texts = [re.sub(r"^\.", "vllm-metis", text) for text in asked.requirements + asked.editable]
        requirements = [Requirement(text) for text in texts]
    extras = set(importlib.metadata.metadata("vllm-metis").get_all("Provides-Extra") or ())
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[dependency-groups]\n")[2].partition("\n[")[0]
    groups = re.findall(r"^(\w+) =", section, re.MULTILINE)
    for requirement in requirements:
        if requirement.name not in {"vllm-metis", *OTHER_PACKAGES}:
            raise WrongCommand(f"{requirement.name} is not this package, and not known here")
        if requirement.name == "vllm-metis" and (unknown := requirement.extras - extras):
            raise WrongCommand(f"no extra {', '.join(unknown)}; {sorted(extras)} are")
    if unknown := sorted(set(asked.group) - set(groups)):
        raise WrongCommand(f"pyproject.toml has no dependency group {', '.join(unknown)}")


def _check_environment(words: list[str]) -> None:
    """Only the one that noxfile.py builds, which must be where a page says."""
    source = (REPOSITORY / "noxfile.py").read_text(encoding="utf-8")
    parts = re.search(r"^ENGINE = ROOT((?: / \"[^\"]+\")+)$", source, re.MULTILINE)
    folder = "/".join(re.findall(r"\"([^\"]+)\"", parts[1])) if parts else ""
    if words != [f"{folder}/bin/activate"]:
        raise WrongCommand(f"noxfile.py builds {folder}, and nothing else is entered")


def _check_serve(words: list[str]) -> None:
    from vllm.entrypoints.launchers import cli_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import vllm_metis

    vllm_metis.register()
    with _exits_are_wrong():
        parser = cli_args.make_arg_parser(FlexibleArgumentParser())
        arguments = parser.parse_args(words)
        cli_args.validate_parsed_serve_args(arguments)
        if arguments.reasoning_parser:
            ReasoningParserManager.get_reasoning_parser(arguments.reasoning_parser)
        if arguments.tool_call_parser:
            ToolParserManager.get_tool_parser(arguments.tool_call_parser)


def _check_harness(words: list[str]) -> None:
    if not words or words[0] not in harness_command.COMMANDS:
        raise WrongCommand(f"python -m harness has {', '.join(harness_command.COMMANDS)}")
    module = importlib.import_module(harness_command.COMMANDS[words[0]][0])
    _parse_or_run(harness_command.main, module, words)


def _check_metis(words: list[str]) -> None:
    if not words or words[0] not in metis_command.COMMANDS:
        raise WrongCommand(f"python -m vllm_metis has {', '.join(metis_command.COMMANDS)}")
    _parse_or_run(metis_command.main, metis_command.COMMANDS[words[0]], words)


def _check_program(words: list[str]) -> None:
    """Only examples; tests/serving runs them, and holds what they print against the page."""
    if not words or REPOSITORY / words[0] not in EXAMPLES:
        raise WrongCommand(f"python runs {', '.join(f'examples/{p.name}' for p in EXAMPLES)}")


def shown_outputs(page: Path) -> dict[str, list[str]]:
    """The lines that a page shows below each command of its `console` blocks, where there are."""
    found: dict[str, list[str]] = {}
    for _, language, lines in fences(page):
        command = ""
        for line in lines if language == "console" else ():
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
            else:
                found.setdefault(command, []).append(line)
    return found


def _parse_or_run(main: Callable[[list[str]], int], module: object, words: list[str]) -> None:
    readers_own = any(word.startswith(("/", "matrices/baselines/")) for word in words)
    run = module.run if words[0] in RUN and not readers_own else lambda arguments: 0
    with _exits_are_wrong(), mock.patch.object(module, "run", run):
        if code := main(words):
            raise WrongCommand(f"exit code {code}")


@contextlib.contextmanager
def _exits_are_wrong() -> Iterator[None]:
    try:
        yield
    except (SystemExit, KeyError, TypeError, ValueError, argparse.ArgumentError) as error:
        raise WrongCommand(f"{type(error).__name__}: {error}") from error


FORMS: dict[str, Callable[[list[str]], None]] = {
    "nox": _check_nox,
    "pytest": _check_pytest,
    "pip install": _check_pip,
    "source": _check_environment,
    "vllm serve": _check_serve,
    "python -m harness": _check_harness,
    "python -m vllm_metis": _check_metis,
    "python": _check_program,
}
