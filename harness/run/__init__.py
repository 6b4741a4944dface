# SPDX-License-Identifier: Apache-2.0
"""Running a matrix: the pytest plugin, the cells, what a terminal shows, where it all happens."""
