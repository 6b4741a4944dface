# SPDX-License-Identifier: Apache-2.0
"""How many processes share a run on a machine, and in which order they take engine groups."""

import os
from pathlib import Path

import pytest

from harness import machine
from harness.matrices.expand import load_matrix
from harness.matrices.select import groups
from harness.run import sharing

MATRICES = Path(__file__).parents[2] / "matrices"


@pytest.fixture(scope="module")
def gpu_parity():
    return load_matrix(MATRICES / "gpu_parity.yaml")


@pytest.fixture
def on(monkeypatch):
    """A function that sets how many cores are there, and what is free on a card, in GB."""

    def put(cores: int, free_gb: float | None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        free_bytes = None if free_gb is None else int(free_gb * 1e9)
        monkeypatch.setattr(machine, "cards_free_bytes", lambda: free_bytes)

    return put


@pytest.mark.parametrize(
    ("cores", "free_gb", "engines", "expected"),
    [
        (16, 150, 60, 16),  # an H200 and its host
        (128, 150, 60, 50),
        (16, 12, 60, 4),  # a small card
        (16, 150, 2, 2),
        (16, 1, 60, 1),  # vLLM then says what is missing
        (1, 150, 60, 1),
    ],
)
def test_card_cores_and_engines_bound_the_processes(
    gpu_parity, on, cores, free_gb, engines, expected
):
    on(cores, free_gb)
    assert sharing.share([gpu_parity], engines).processes == expected


def test_the_figures_are_told(gpu_parity, on):
    on(16, 150)
    why = "16 cores: 16, 150 GB free on the card at 3.0 an engine: 50, 60 engines: 60"
    assert sharing.share([gpu_parity], 60).why == why


def test_without_a_card_engines_share_cores_and_memory(on):
    on(2, None)
    found = sharing.share([load_matrix(MATRICES / "cpu_parity.yaml")], 20)
    assert found.processes <= 2
    assert "2 cores: 2, " in found.why
    assert "free in memory at 2.5 an engine" in found.why


def test_the_longest_group_goes_first_and_one_process_alone_waits_for_the_taught_model(gpu_parity):
    by_group = groups(gpu_parity.cells)
    order = sharing.ordered(gpu_parity, by_group, 4)
    assert sorted(order) == sorted(by_group)
    order = [name for name in order if not name.endswith(("logos", "praxis"))]
    taught = [place for place, name in enumerate(order) if name.endswith("-taught")]
    assert taught[0] == 0
    assert taught[1:] == list(range(8, 7 + len(taught)))
    rest = [name for name in order if not name.endswith("-taught")]
    assert "fp32-full-far32k-tiny" in rest[:4]  # minutes of the reference
    assert {"fp8-full-warm-tiny16", "fp8-eager-warm-tiny16"} < set(rest[:6])  # prompts of blocks
    alike = [name for name in rest if name.startswith("fp32-") and "far" not in name]
    assert len(by_group[alike[0]]) > 1
    assert len(by_group[alike[-1]]) == 1


def test_engines_of_the_published_shapes_come_in_pairs_a_round_of_the_processes_apart(gpu_parity):
    order = sharing.ordered(gpu_parity, groups(gpu_parity.cells), 10)
    places = [place for place, name in enumerate(order) if name.endswith(("logos", "praxis"))]
    assert places == [0, 1, 10, 11, 20, 21, 30, 31]
    assert {order[place].rpartition("-")[2] for place in places[::2]} == {"logos"}
