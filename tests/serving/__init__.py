# SPDX-License-Identifier: Apache-2.0
"""Tests of a running server, through its clients."""

import pytest

# Modules of this package that assert for the tests, and should say as much when that fails.
pytest.register_assert_rewrite(
    "tests.serving.service", "tests.serving.responses", "tests.serving.messages"
)
