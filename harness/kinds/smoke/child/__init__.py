# SPDX-License-Identifier: Apache-2.0
"""The child of a smoke matrix, and what it sees of a server as its client."""
