# SPDX-License-Identifier: Apache-2.0
"""Tests of the harness itself, with engines that are played: they need neither torch nor vLLM."""
