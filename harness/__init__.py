# SPDX-License-Identifier: Apache-2.0
"""What proves that `vllm_metis` computes Metis-1.6: reference, checkpoints, matrices and reports.

Never part of the wheel, and never imported by it.
"""
