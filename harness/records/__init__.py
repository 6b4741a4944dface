# SPDX-License-Identifier: Apache-2.0
"""Run folders: read and written, judged again, explained, compared, kept as baselines."""
