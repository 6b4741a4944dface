# SPDX-License-Identifier: Apache-2.0
"""What a request says, whichever of vLLM's APIs it came by."""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.tool_parsers.utils import iter_response_function_tool_info

Request = ChatCompletionRequest | ResponsesRequest


def schema_of(name: str, tools: Sequence[Any]) -> dict[str, Any] | None:
    """Return the schema that the request's tool of this name declares for its parameters."""
    for tool in tools:
        if isinstance(tool, ChatCompletionToolsParam):
            declared = [(tool.function.name, tool.function.parameters)]
        else:
            declared = iter_response_function_tool_info(tool)
        for tool_name, schema in declared:
            if tool_name == name:
                return schema
    return None
