# SPDX-License-Identifier: Apache-2.0
"""Faults that a matrix must turn red, seeded in a child that otherwise is the engine's own.

`SEEDED_FAULT=NAME python -m tests.faults CONFIG` is `python -m harness.kinds.parity.child CONFIG` with
one thing wrong: a name is replaced in the modules of `vllm_metis`, or of vLLM, before the engine is
built. Plugin and harness know nothing of it.
"""
