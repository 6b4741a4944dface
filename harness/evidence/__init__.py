# SPDX-License-Identifier: Apache-2.0
"""What is written down of a cell and decided about it: the types that every kind of cell shares.

They are frozen, know every field and keep NaN and infinity, so that `load(save(record)) == record`.
What one kind alone observes stands in its folder under `harness/kinds`.
"""
