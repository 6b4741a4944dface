# SPDX-License-Identifier: Apache-2.0
"""The reference: Metis-1.6 in plain PyTorch on Transformers' base classes.

Its files are also the remote code of the checkpoints that are written here, which is why they are
called as Transformers calls such code.
"""
