# SPDX-License-Identifier: Apache-2.0
"""The forward pass of docs/model.md over the layers of vLLM; `metis16` is what vLLM loads."""
