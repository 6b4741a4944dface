# SPDX-License-Identifier: Apache-2.0
"""A run as people read it: Markdown for a pull request, and one HTML page."""
