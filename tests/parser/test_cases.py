# SPDX-License-Identifier: Apache-2.0
"""Every parser case of tests/cases passes, and the command that replays such files says what it found."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.__main__ import main
from harness.serving.cases import Case, CaseRunner, load_cases

CASES = Path(__file__).parents[1] / "cases"
REPLAYED = [
    pytest.param(case, id=case.id)
    for file in ("parsers.yaml", "turns.yaml")
    for case in load_cases(CASES / file)
    if isinstance(case, Case)
]
CASE = {
    "id": "hello",
    "kind": "parser_whole",
    "request": {"thinking": True},
    "model_output": "Hm.\n</think>\n\nHello.<|fim_suffix|>",
    "expected": {"reasoning": "Hm.", "content": "Hello.", "tool_calls": []},
}


@pytest.fixture(scope="module")
def runner(checkpoint: Any) -> CaseRunner:
    return CaseRunner(checkpoint())


@pytest.mark.parametrize("case", REPLAYED)
def test_case(runner: CaseRunner, case: Case):
    assert runner.mismatches(case) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"expected": {**CASE["expected"], "content": "Hello"}}, "the content differs"),
        ({"expected": {**CASE["expected"], "reasoning": None}}, "the reasoning differs"),
        (
            {"expected": {**CASE["expected"], "tool_calls": [{"name": "f", "arguments": {}}]}},
            "the calls differ",
        ),
        ({"expected": {**CASE["expected"], "finish_reason": "length"}}, "finish_reason is stop"),
        ({"request": {"thinking": True, "temperature": -1}}, "vLLM refused the request"),
    ],
)
def test_a_case_that_is_not_met_fails_with_its_reason(
    runner: CaseRunner, change: dict[str, Any], reason: str
):
    (mismatch,) = runner.mismatches(Case.model_validate(CASE | change))
    assert mismatch.reason.startswith(reason)
    assert mismatch.deliveries == ("whole", "1", "2", "3", "7", "all")


def test_pieces_are_counted_in_deltas_of_one_token(runner: CaseRunner):
    call = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "model_output": "<|tool_call|><function=f>\n<parameter=a>\nx y z\n</parameter>\n</function>",
        "expected": {
            "reasoning": None,
            "content": None,
            "tool_calls": [{"name": "f", "arguments": {"a": "x y z"}}],
        },
    }
    assert runner.mismatches(Case.model_validate(CASE | call)) == []
    call["expected"]["min_arg_chunks"] = 100
    (mismatch,) = runner.mismatches(Case.model_validate(CASE | call))
    assert mismatch.deliveries == ("1",)


def exit_code(file: Path, *options: str) -> int:
    return main(["cases", str(file), *options])


def test_the_command_prints_a_line_a_case_and_exits_1_when_one_fails(
    tmp_path: Path, checkpoint: Any
):
    file = tmp_path / "cases.yaml"
    wrong = {**CASE, "id": "wrong", "expected": {**CASE["expected"], "content": "Bye."}}
    file.write_text(yaml.safe_dump([CASE, wrong, {**CASE, "id": "later", "kind": "server"}]))
    result = subprocess.run(
        [sys.executable, "-m", "harness", "cases", str(file), "--model", str(checkpoint())],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "pass     hello"
    assert lines[1] == "fail     wrong"
    assert lines[2].strip() == "whole, 1, 2, 3, 7, all: the content differs"
    assert '"content": "Bye."' in lines[3]
    assert '"content": "Hello."' in lines[4]
    assert lines[-2:] == ["not run  later: it needs a running server", "1 pass, 1 fail, 1 not run"]


def test_the_command_exits_0_when_all_pass_and_4_when_nothing_ran(tmp_path: Path):
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump([CASE]))
    assert exit_code(file) == 0
    file.write_text(yaml.safe_dump([{**CASE, "kind": "server"}]))
    assert exit_code(file) == 4


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"kind": "parser"},
            "kind: expected 'parser_whole', 'parser_stream', 'server', found 'parser'",
        ),
        ({"model_output": None}, "model_output"),
        ({"expected": {"reasoning": "Hm."}}, "content is missing"),
        ({"expected": {**CASE["expected"], "contents": ""}}, "unknown key 'contents'"),
        ({"request": {"parsers": "none"}}, "expected 'both', 'reasoning_only' or 'tool_only'"),
        ({"request": {"thinks": True}}, "request.thinks is no field"),
    ],
)
def test_a_malformed_file_exits_2_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], fault: str
):
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump([CASE | change]))
    assert exit_code(file) == 2
    error = capsys.readouterr().err
    assert fault in error
    assert "hello" in error or "cases.yaml:" in error


@pytest.mark.parametrize("text", ["", "a: 1", "[]", "- [", "- id: x\n  id: y", None])
def test_a_file_that_is_no_list_of_cases_exits_2(tmp_path: Path, text: str | None):
    file = tmp_path / "cases.yaml"
    if text is not None:
        file.write_text(text)
    assert exit_code(file) == 2
