# SPDX-License-Identifier: Apache-2.0
"""Tests of how a checkpoint is read: its audit, its loading, its quantization."""
