# SPDX-License-Identifier: Apache-2.0
"""The parser benchmark measures every text, and its exit code follows its limits."""

import pytest

from harness.__main__ import main
from harness.serving import bench


def run(*options: str) -> int:
    return main(["bench", "parsers", *options])


@pytest.mark.parametrize(("limit", "code", "verdict"), [(1e9, 0, "pass"), (0.0, 1, "fail")])
def test_every_ratio_is_held_to_its_limit(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: float,
    code: int,
    verdict: str,
):
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "GROWTH_LIMIT", limit)
    monkeypatch.setattr(bench, "QWEN3_LIMIT", limit)
    assert run("--tokens", "2000") == code
    rows = capsys.readouterr().out.splitlines()[-7:]
    names = (
        "reasoning:",
        "reasoning:",
        "content:",
        "content:",
        "argument:",
        "argument:",
        "reasoning",
    )
    for row, name in zip(rows, names, strict=True):
        assert row.startswith(name)
        assert row.endswith(verdict)


def test_a_length_that_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run("--tokens", "100") == 2
    assert "at least 2000" in capsys.readouterr().out
