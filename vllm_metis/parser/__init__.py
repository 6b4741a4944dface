# SPDX-License-Identifier: Apache-2.0
"""How the text of a turn becomes reasoning, content and tool calls; `adapters` is what vLLM loads."""
