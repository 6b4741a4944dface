# SPDX-License-Identifier: Apache-2.0
"""The grammar of calls for constrained decoding: strict tools, and `tool_choice` required or named.

vLLM would ask for a JSON list of calls where a parser has no structural tag; the model knows its own
format only, so that is what it is held to. The marker is matched as a token, never as text.

A call that starts straight out of the reasoning has its marker before the grammar begins, and then a
second one is asked for: the parser takes the first for an empty call, and drops it.
"""

import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.tool_parsers.structural_tag_registry import (
    get_function_parameters,
    get_model_structural_tag,
    register_vllm_structural_tag,
)
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from xgrammar import StructuralTag
from xgrammar.openai_tool_call_schema import BuiltinToolParam, FunctionToolParam
from xgrammar.structural_tag import (
    ConstStringFormat,
    Format,
    JSONSchemaFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TokenTriggeredTagsFormat,
)

from vllm_metis.call import FUNCTION, FUNCTION_END

MODEL = "metis"


def structural_tag(
    request: ChatCompletionRequest | ResponsesRequest, strict_level: ToolStrictLevel, marker: int
) -> StructuralTag | None:
    """Return the grammar that the request asks for, None if it leaves calls free.

    Arguments of a forced call fit their schema whether or not the tool is strict, unless xgrammar
    cannot follow the schema.

    Args:
        marker: id of the token `<|tool_call|>`.
    """
    tag = None
    if request.tool_choice != "auto":
        tag = _tag(request, ToolStrictLevel.PARAMETER, marker)
    if tag is None or not _is_supported(tag):
        tag = _tag(request, strict_level, marker)
    return tag


def _tag(
    request: ChatCompletionRequest | ResponsesRequest, strict_level: ToolStrictLevel, marker: int
) -> StructuralTag | None:
    return get_model_structural_tag(
        model=MODEL,
        tools=request.tools,
        tool_choice=request.tool_choice,
        reasoning=False,
        token_suffix=str(marker),  # vLLM hands this text on to the builder below
        strict_level=strict_level,
    )


def _is_supported(tag: StructuralTag) -> bool:
    try:
        xgrammar.Grammar.from_structural_tag(tag)
    except (RuntimeError, ValueError):
        return False
    return True


@register_vllm_structural_tag(MODEL)
def _metis_structural_tag(
    tools: list[FunctionToolParam],
    builtin_tools: list[BuiltinToolParam],
    tool_choice: str,
    reasoning: bool,
    token_suffix: str,
) -> StructuralTag:
    """Build the tag for a request that vLLM normalized; `token_suffix` is the marker's id."""
    marker = int(token_suffix)
    calls: list[Format] = [
        SequenceFormat(
            elements=[
                ConstStringFormat(value=f"{FUNCTION}{tool.function.name}>\n"),
                JSONSchemaFormat(
                    json_schema=get_function_parameters(tool.function), style="qwen_xml"
                ),
            ]
        )
        for tool in tools
    ]
    call = TagFormat(
        begin=TokenFormat(token=marker), content=OrFormat(elements=calls), end=FUNCTION_END
    )
    if tool_choice == "auto":
        return StructuralTag(format=TokenTriggeredTagsFormat(trigger_tokens=[marker], tags=[call]))
    forced = TagsWithSeparatorFormat(
        tags=[call], separator="", at_least_one=True, stop_after_first=tool_choice == "forced"
    )
    # The line breaks that the template writes after </think> come first.
    return StructuralTag(format=SequenceFormat(elements=[RegexFormat(pattern=r"\n{0,2}"), forced]))
