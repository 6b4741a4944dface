# SPDX-License-Identifier: Apache-2.0
"""Every tensor that vLLM holds against the checkpoint it was loaded from."""
