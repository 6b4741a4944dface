# SPDX-License-Identifier: Apache-2.0
"""What `python -m harness` exits with, and which of it a run's verdicts come to."""

from collections.abc import Iterable

PASSED = 0
FAILED = 1
"""Parity or behaviour; of `compare` and `baseline`, that a cell got worse or did not pass."""
USAGE = 2
INFRASTRUCTURE = 3
NOT_REACHED = 4


def of_verdicts(verdicts: Iterable[str]) -> int:
    """Return the exit code of a run with these verdicts; the gravest one wins."""
    names = set(verdicts)
    if "error" in names:
        return INFRASTRUCTURE
    if "not_reached" in names or not names & {"pass", "fail"}:
        return NOT_REACHED
    return FAILED if "fail" in names else PASSED
