# SPDX-License-Identifier: Apache-2.0
"""Faults that a matrix must turn red, seeded in a child that otherwise is the engine's own.

`python -m tests.faults NAME CONFIG` is `python -m harness.engine CONFIG` with one thing wrong: a
name is replaced in the modules of `vllm_metis`, or of vLLM, before the engine is built. Plugin and
harness know nothing of it.
"""
