# SPDX-License-Identifier: Apache-2.0
"""What the reference says of tokens: as a child of a run, as a file of logits, against golden vectors."""
