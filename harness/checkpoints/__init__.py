# SPDX-License-Identifier: Apache-2.0
"""Checkpoints laid out like the release: written, spelled in every way, quantized, taught."""
