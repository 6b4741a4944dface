# SPDX-License-Identifier: Apache-2.0
"""From a YAML file to cells: read, checked, expanded, selected, listed, described to editors."""
