# SPDX-License-Identifier: Apache-2.0
"""From evidence to findings: metrics, budgets, and what several kinds of cells are judged by.

Pure functions of evidence. Needs neither torch nor vLLM.
"""
