# SPDX-License-Identifier: Apache-2.0
"""The child of a soak matrix: the clients of a server, what they ask, and what watches it."""
