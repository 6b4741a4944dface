# SPDX-License-Identifier: Apache-2.0
"""What models are asked: prompts of matrices as token ids, and conversations with known answers."""
