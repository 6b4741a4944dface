# SPDX-License-Identifier: Apache-2.0
"""Tests of the parsers, through vLLM's own serving layer and without an engine."""
