# SPDX-License-Identifier: Apache-2.0
"""Makes `pytest matrices/NAME.yaml` run a matrix."""

pytest_plugins = ["harness.run.plugin"]
