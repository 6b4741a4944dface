# SPDX-License-Identifier: Apache-2.0
"""Where a run happened, as its records keep it."""

from __future__ import annotations

from pydantic import Field

from harness.evidence.base import Evidence


class Machine(Evidence):
    """The computer, its cards left out."""

    system: str
    architecture: str
    processor: str
    cores: int | None


class Card(Evidence):
    """One CUDA device when the run began, in nvidia-smi's words; `[N/A]` where it cannot say."""

    name: str
    driver: str
    memory_mib: str
    memory_used_mib: str
    compute_capability: str
    sm_clock_mhz: str
    max_sm_clock_mhz: str
    power_limit_w: str


class ForeignProcess(Evidence):
    """Whoever else held memory of a card: that explains times, and failures to allocate."""

    name: str
    memory_mib: str


class Git(Evidence):
    """The commit, and whether tracked files differ from it; None outside a checkout."""

    commit: str | None
    dirty: bool | None


class Environment(Evidence):
    """Everything worth keeping of a machine and of the sources that ran there.

    Attributes:
        versions: of Python and of packages, by name.
        sources_sha256: by the folder or file of the sources.
        flags: environment variables that change what vLLM does; those that look secret, masked.
        processes: of the run that shared the machine; None in records from before it was written.
    """

    versions: dict[str, str]
    sources_sha256: dict[str, str]
    machine: Machine
    cards: list[Card]
    foreign_processes_on_cards: list[ForeignProcess]
    git: Git
    flags: dict[str, str]
    processes: int | None = Field(default=None, exclude_if=lambda number: number is None)

    @property
    def card_name(self) -> str:
        """The card's name for a folder: `nvidia-h200`, or `cpu` without one."""
        if not self.cards:
            return "cpu"
        return "-".join(self.cards[0].name.lower().split())
