# SPDX-License-Identifier: Apache-2.0
"""vLLM's serving layer: a real server and its clients, and the layer alone over written tokens."""
