# SPDX-License-Identifier: Apache-2.0
"""The child of a speed matrix: weights, rounds, and the bytes that a step must move."""
