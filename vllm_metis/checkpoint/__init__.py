# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, under which names and in which dtypes, and how it becomes parameters."""
