# SPDX-License-Identifier: Apache-2.0
"""The grammar of calls for constrained decoding: strict tools, and `tool_choice` required or named.

vLLM would ask for a JSON list of calls where a parser has no structural tag; the model knows its own
format only, so that is what it is held to. The marker is matched as a token, never as text.

A call that starts straight out of the reasoning has its marker before the grammar begins, and then a
second one is asked for: the parser takes the first for an empty call, and drops it.
"""

import functools
import json
import re
from typing import Any

import xgrammar
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
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
    GrammarFormat,
    JSONSchemaFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TokenTriggeredTagsFormat,
)

from vllm_metis.parser.call import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from vllm_metis.parser.request import Request
from vllm_metis.parser.schema import is_circular
from vllm_metis.parser.turn import Binding

MODEL = "metis"

# How xgrammar prints a parameter: any white space may stand around its value.
_SPACE = re.escape(r"[ \n\r\t]*")
_PARAMETER = re.compile(
    rf'(?P<tag>"{PARAMETER}(?:[^"\\]|\\.)*"(?: \w+)?) ">" '
    rf'(?:{_SPACE} )?(?P<value>\w+) (?:{_SPACE} )?"{PARAMETER_END}"'
)
# Without a type, these tell what fits a schema.
_OTHER_ROOTS = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
_PLACE_IN_XGRAMMAR = re.compile(r"\[[\d:]+\] \S+:\d+: ")


def binding(constraint: StructuredOutputsParams | None, marker: int) -> Binding:
    """Return what the constraint of a request binds, as far as is known of a client's own tag.

    Args:
        marker: id of the token `<|tool_call|>`.
    """
    if constraint is None:
        return Binding()
    tag = constraint.structural_tag
    if tag is None:
        return Binding(content=True)
    if json.dumps(TokenFormat(token=marker).model_dump()) not in tag:
        return Binding()
    # vLLM lets an answer of the format that the request asks for stand beside the calls.
    return Binding(answer=json.loads(tag)["format"]["type"] == "or", calls=True)


def structural_tag(
    request: Request, strict_level: ToolStrictLevel, marker: int
) -> StructuralTag | None:
    """Return the grammar that the request asks for, None if it leaves calls free.

    Arguments of a forced call fit their schema whether or not the tool is strict.

    Args:
        marker: id of the token `<|tool_call|>`.
    Raises:
        VLLMValidationError: no grammar follows the schema of a tool that is bound by it.
    """
    return get_model_structural_tag(
        model=MODEL,
        tools=request.tools,
        tool_choice=request.tool_choice,
        reasoning=False,
        token_suffix=str(marker),  # vLLM hands this text on to the builder below
        strict_level=strict_level if request.tool_choice == "auto" else ToolStrictLevel.PARAMETER,
    )


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
                GrammarFormat(grammar=_arguments(tool)),
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


def _arguments(tool: FunctionToolParam) -> str:
    """Return the grammar of the tool's parameters; refuse a schema that none can follow."""
    schema = get_function_parameters(tool.function)
    try:
        return _parameters(json.dumps(schema))
    except (RuntimeError, ValueError) as error:
        fault = _PLACE_IN_XGRAMMAR.sub("", str(error)).strip()
        raise VLLMValidationError(
            f"calls of the tool {tool.function.name} cannot be held to its parameters' schema: {fault}",
            parameter="tools",
        ) from error


@functools.lru_cache(maxsize=256)
def _parameters(schema_text: str) -> str:
    """Return the EBNF of parameters as the template writes them.

    xgrammar lets any white space stand around a value, but of raw text it would be a part. It has no
    switch for that, so the grammar it prints is edited: there are the template's line breaks, alone.
    """
    schema: Any = json.loads(schema_text)
    if is_circular(schema):
        raise ValueError("its references lead back to themselves, so that nothing fits")
    if isinstance(schema, dict):
        kinds = schema.get("type", [] if _OTHER_ROOTS & schema.keys() else "object")
        if "object" in (kinds if isinstance(kinds, list) else [kinds]):
            schema["type"] = "object"
        elif kinds:
            raise ValueError(f"parameters are an object, and its type is {kinds!r}")
    tag = StructuralTag(format=JSONSchemaFormat(json_schema=schema, style="qwen_xml"))
    printed = str(xgrammar.Grammar.from_structural_tag(tag))
    return _PARAMETER.sub(rf'\g<tag> ">\\n" \g<value> "\\n{PARAMETER_END}"', printed)
