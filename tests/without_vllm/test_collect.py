# SPDX-License-Identifier: Apache-2.0
"""`pytest NAME.yaml`: what is collected, selected, shown, resumed, and what makes a run fail.

A fake child stands in for the engine and the reference (tests/without_vllm/fake_child.py).
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from harness.records import store as records
from tests.without_vllm.fake_matrix import CHILDREN, matrix_text

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[2]
CONFTEST = f"""
import harness.machine
import harness.run.cells
pytest_plugins = ["harness.run.plugin"]
harness.run.cells.CHILDREN = {CHILDREN!r}
harness.machine.processor = lambda: "any"  # asking takes a second
"""
TWO_GROUPS = """
  start:
    now: {}
    later: {engine: {env: {FAKE_START: fine, LATER: "1"}}}
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with a matrix `demo.yaml`; returns a function that writes it anew."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")

    def write(*names: str, two_groups: bool = False, **options: object) -> None:
        text = matrix_text(*names, **options) + (TWO_GROUPS if two_groups else "")
        (pytester.path / "demo.yaml").write_text(text)

    write("fine", "wrong_token")
    return write


def run(pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("demo.yaml", *arguments)


def only_run(pytester) -> Path:
    (folder,) = (pytester.path / "results").iterdir()
    return folder


def starts(folder: Path) -> int:
    return (folder / "cache" / "starts").read_text().count("start")


def test_a_dry_run_shows_groups_and_cells_and_writes_nothing(pytester, project):
    project("fine", "wrong_token", two_groups=True)
    result = run(pytester, "--collect-only")
    result.stdout.fnmatch_lines(
        [
            "*<MatrixFile demo.yaml>*",
            "*<EngineGroup parity>*",
            "*<CellItem fine-now>*",
            "*4 tests collected*",
        ]
    )
    assert not (pytester.path / "results").exists()


def test_a_run_writes_records_and_prints_cells_and_a_table(pytester, project):
    result = run(pytester)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "[[]1/2[]] fine · engine parity, starting · about * left",
            "*pass * fine: decode_logprob_error_max 0 of 0.0001, * s",
            "[[]2/2[]] wrong_token · engine parity · about * left",
            "*fail * wrong_token: greedy_mismatches 1 of 0, * s",
            "*wrong_token [[]engine parity[]]*",
            "fail: wrong_token",
            "*position 0: token 9, but the reference prefers 10*",
            "*run it alone: pytest demo.yaml --cell wrong_token",
            "cell * verdict * observed * budget*",
            "records: results/*-demo *",
        ]
    )
    folder = only_run(pytester)
    assert starts(folder) == 1
    assert records.load(folder / "fine.json").verdict.verdict == "pass"
    assert records.load_run(folder)[0].cells == ["fine", "wrong_token"]


def test_a_failed_cell_shows_no_traceback_of_the_harness(pytester, project):
    assert "Traceback" not in run(pytester).stdout.str()
    assert "def runtest" not in run(pytester).stdout.str()


def test_a_run_in_which_cells_disagree_fails_though_each_passed(pytester, project):
    project("fine")
    found = "import harness.records.agree\nharness.records.agree.sentences = lambda _: ['odd one out: b']"
    pytester.makeconftest(f"{CONFTEST}\n{found}")
    result = run(pytester)
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*odd one out: b"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("-k", "fine and not wrong"),
        ("--cell", "fi*"),
        ("--axis", "child=fine"),
        ("-x", "--cell=fine"),
    ],
)
def test_filters_select_cells(pytester, project, arguments):
    result = run(pytester, *arguments)
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == pytest.ExitCode.OK
    assert records.load_run(only_run(pytester))[0].cells == ["fine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axis", "size=big"], "*expected AXIS=VALUE with an axis out of child*"),
        (["--cell", "nothing"], "*no cell of demo matches*"),
        (["--resume", "absent"], "*--resume absent: no run is there*"),
        (["--resume", "a", "--results", "b"], "*give one of them*"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(pytester, project, arguments, message):
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert not (pytester.path / "results").exists()


def test_a_faulty_matrix_is_told_with_its_lines(pytester, project):
    path = pytester.path / "demo.yaml"
    path.write_text(path.read_text().replace("precision: fp32", "precission: fp32"))
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*demo.yaml:9: unknown key 'precission' in base; allowed: *"])


def test_a_run_in_which_nothing_ran_fails(pytester, project):
    conftest = CONFTEST + (
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.skip)\n"
    )
    pytester.makeconftest(conftest)
    result = run(pytester)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*no cell ran: that proves nothing, so the run fails"])


def test_a_cell_that_is_not_reached_fails_the_run(pytester, project):
    path = pytester.path / "demo.yaml"
    path.write_text(path.read_text().replace("preemptions: none", "preemptions: some"))
    result = run(pytester, "--cell", "fine")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["not_reached: fine", "*preemptions: expected at least 1, found 0"])


def test_an_engine_ends_with_its_group(pytester, project):
    project("fine", two_groups=True)
    run(pytester).assert_outcomes(passed=2)
    assert starts(only_run(pytester)) == 2


def test_a_named_results_folder_is_not_overwritten_unless_told(pytester, project):
    assert run(pytester, "--results", "out", "--cell", "fine").ret == pytest.ExitCode.OK
    again = run(pytester, "--results", "out", "--cell", "fine")
    assert again.ret == pytest.ExitCode.USAGE_ERROR
    again.stderr.fnmatch_lines(["*--results out: a run is there; pass --resume or --overwrite"])
    assert (
        run(pytester, "--results", "out", "--cell", "fine", "--overwrite").ret == pytest.ExitCode.OK
    )


def test_resuming_takes_unchanged_cells_as_recorded_and_starts_no_engine(pytester, project):
    run(pytester, "--results", "out")
    result = run(pytester, "--resume", "out")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*fine: * as recorded", "*wrong_token: * as recorded"])
    assert starts(pytester.path / "out") == 1


def test_resuming_runs_changed_cells_errors_and_cells_without_a_record(pytester, project):
    project("fine", "crash", "nan")
    run(pytester, "--results", "out", "--cell", "fine", "--cell", "crash")
    (pytester.path / "out" / "fine.json").unlink()
    result = run(pytester, "--resume", "out", "--cell", "fine", "--cell", "crash")
    assert "as recorded" not in result.stdout.str()
    assert records.load_run(pytester.path / "out")[0].cells == ["fine", "crash"]
    project("fine", "crash", "nan", cell_s=19)
    result = run(pytester, "--resume", "out", "--cell", "fine")
    assert "as recorded" not in result.stdout.str()


def test_junit_carries_the_figures(pytester, project):
    run(pytester, "--junitxml=cells.xml")
    cases = ElementTree.parse(pytester.path / "cells.xml").iter("testcase")
    properties = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in cases
    }
    assert properties["fine"]["verdict"] == "pass"
    assert properties["wrong_token"]["metric"] == "greedy_mismatches"
    assert float(properties["wrong_token"]["observed"]) == 1


def test_last_failed_runs_only_what_failed(pytester, project):
    pytester.makeini("[pytest]\n")
    run(pytester)
    run(pytester, "--lf").assert_outcomes(failed=1, deselected=1)


def test_xdist_keeps_the_cells_of_a_group_in_one_process(pytester, project):
    project("fine", "raise", "wrong_token", two_groups=True)
    result = run(pytester, "-n", "2")
    result.assert_outcomes(passed=2, failed=4)
    folder = only_run(pytester)
    # One start a group, and one more each for the engine that was lost with `raise`.
    assert starts(folder) == 4
    assert sorted(path.stem for path in folder.glob("*-*.json")) == sorted(
        f"{child}-{start}"
        for child in ("fine", "raise", "wrong_token")
        for start in ("now", "later")
    )
    result.stdout.fnmatch_lines(["*fine-now*pass*", "*fine-later*pass*"])


def test_a_machine_decides_how_many_engines_run_at_once_and_says_why(
    pytester, project, monkeypatch
):
    project("fine", two_groups=True)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    result = run(pytester, "-n", "auto", "--axis", "start=now")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["engines at once: 1 (* cores: *, 1 engines: 1); -n NUMBER*"])


def test_xdist_takes_the_longest_group_first(pytester, project):
    project("fine", "wrong_token", two_groups=True)
    text = (pytester.path / "demo.yaml").read_text()
    exclude = "exclude: [{start: now, child: wrong_token}]\n"
    (pytester.path / "demo.yaml").write_text(text + exclude)
    assert "fine-now" in run(pytester, "--collect-only", "-q").stdout.lines[0]
    run(pytester, "-n", "1").stdout.fnmatch_lines(["[[]1/3[]] *-later *", "[[]3/3[]] fine-now *"])


def test_last_failed_and_xdist_agree_on_names(pytester, project):
    pytester.makeini("[pytest]\n")
    run(pytester, "-n", "2")
    run(pytester, "--lf").assert_outcomes(failed=1, deselected=1)


def test_yaml_beside_tests_is_no_matrix_unless_named(pytester, project):
    pytester.makepyfile(test_one="def test_one(): pass")
    (pytester.path / "cases.yaml").write_text("- 1")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_interrupting_keeps_finished_records_and_leaves_no_process(pytester, project, monkeypatch):
    project("fine", "hang", "wrong_token", cell_s=60)
    fifo = pytester.path / "pids"
    os.mkfifo(fifo)
    monkeypatch.setenv("FAKE_FIFO", str(fifo))
    command = [sys.executable, "-m", "pytest", "demo.yaml", "--results", "out"]
    process = subprocess.Popen(
        command,
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    pids = [int(pid) for pid in fifo.read_text().split()]  # waits until the child hangs
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert not any(psutil.pid_exists(pid) and not _is_zombie(pid) for pid in pids)
    assert records.load(pytester.path / "out" / "fine.json").verdict.verdict == "pass"
    _, found, faults = records.load_run(pytester.path / "out")
    assert [record.cell for record in found] == ["fine"]
    assert len(faults) == 2
    assert re.search("hang: no record; the cell was selected but did not finish", output)


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
