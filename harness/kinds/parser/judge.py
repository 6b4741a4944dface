# SPDX-License-Identifier: Apache-2.0
"""The verdict on a parser cell: every comparison held, and there were some."""

from __future__ import annotations

from harness.evidence.verdict import Verdict
from harness.judging.findings import none_expected
from harness.kinds.parser.observation import ParserObservation


def judge(observation: ParserObservation) -> Verdict:
    """Decide from what was compared."""
    if observation.comparisons == 0:
        return Verdict(verdict="not_reached", reasons=["no rendering was parsed"])
    finding = none_expected("parser_faults", len(observation.faults))
    return Verdict(
        verdict="pass" if finding.passed else "fail",
        reasons=observation.faults,
        findings=[finding],
    )
