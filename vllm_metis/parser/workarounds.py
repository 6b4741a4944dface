# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM 0.31's serving layer, mended for these models: a function each.

When vLLM mends one, the function goes, with the lines in `adapters` or `engine` that call it and
its line in docs/turns.md. None needs another.
"""

import json
from collections.abc import Sequence
from typing import Protocol

from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from vllm_metis.parser.request import Request
from vllm_metis.parser.schema import is_circular

_HIDES_REASONING = "metis_hides_reasoning"  # an extra field of the request object


class _ReadsPrompt(Protocol):
    def read_prompt(self, prompt_token_ids: Sequence[int]) -> None: ...


def refuse_circular_schema(request: Request) -> None:
    """Refuse a schema that the engine would fail to compile as if that were a fault of the server.

    Raises:
        VLLMValidationError: The references of the content's schema lead back to themselves.

    Upstream: https://github.com/vllm-project/vllm/issues/57725
    """
    constraint = request.extract_structured_outputs()
    schema = constraint.json if constraint else None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return  # vLLM says so itself
    if is_circular(schema):
        field = "text" if isinstance(request, ResponsesRequest) else "response_format"
        raise VLLMValidationError(
            "the JSON schema's references lead back to themselves, so that nothing fits it",
            parameter=field,
        )


def hide_reasoning_ourselves(request: Request) -> None:
    """Take `include_reasoning: false` over from vLLM; `hides_reasoning` then tells of it.

    vLLM would take the turn for one without reasoning: a grammar would bind the thinking too, and the
    parser would not be shown the prompt. Where token ids or logprobs are asked for, vLLM has to know
    that they must not tell the reasoning, so there it keeps its way.

    Upstream: https://github.com/vllm-project/vllm/issues/53284
    """
    if isinstance(request, ChatCompletionRequest) and not (
        request.include_reasoning or request.logprobs or request.return_token_ids
    ):
        request.include_reasoning = True
        setattr(request, _HIDES_REASONING, True)


def hides_reasoning(request: Request) -> bool:
    """Whether `hide_reasoning_ourselves` took the request over."""
    # Much faster than to ask the object for a field that it nearly never has.
    extra = getattr(request, "model_extra", None)
    return extra is not None and extra.get(_HIDES_REASONING) is True


def show_prompt(parser: _ReadsPrompt, prompt_token_ids: Sequence[int]) -> None:
    """Show a parser the prompt where vLLM asks whether reasoning ended in it.

    Of a response that is not streamed, the parser is not shown the prompt otherwise.

    Upstream: https://github.com/vllm-project/vllm/issues/53284
    """
    parser.read_prompt(prompt_token_ids)


def tell_other_choices(request: Request, thinks: bool) -> None:
    """Pass on what the prompt told: vLLM shows it to the parser of the first choice only.

    Upstream: https://github.com/vllm-project/vllm/issues/53284
    """
    if isinstance(request, ChatCompletionRequest):
        request.chat_template_kwargs = {
            **(request.chat_template_kwargs or {}),
            "enable_thinking": thinks,
        }


def was_direct_after_all(is_guessed: bool, ended_in_reasoning: bool) -> bool:
    """Whether a whole turn, taken for one of thinking, was none: it ended without `</think>`.

    vLLM never shows the prompt of a response of `/v1/responses` that is not streamed, so that its
    mode is guessed where the request does not tell it.

    Upstream: https://github.com/vllm-project/vllm/issues/53284
    """
    return is_guessed and ended_in_reasoning


def say_what_was_called(request: Request, called: bool) -> None:
    """Let vLLM build its full response from what was written, as it does where calls are free.

    Of a required call it would say finish_reason "tool_calls" also where a stop string came before any,
    with an empty text for the content. It reads the request after this.

    Upstream: https://github.com/vllm-project/vllm/issues/53255
    """
    if not isinstance(request, ChatCompletionRequest) or request.tool_choice != "required":
        return
    if request.tools:
        request.tool_choice = "auto"
    elif not called:  # the Messages API lets a client force a call without tools
        request.tool_choice = "none"


def uncounted_if_cut(
    calls: list[FunctionCall], request: Request, token_ids: Sequence[int], is_ended: bool
) -> list[FunctionCall]:
    """Return the calls so that vLLM does not count them if a limit ended the output.

    Its full response says finish_reason "tool_calls" where `len(calls) > 0`, also of a turn that
    max_tokens cut; it then lists the calls by iterating over them.

    Args:
        is_ended: whether the model ended the turn.

    Upstream: https://github.com/vllm-project/vllm/issues/53269
    """
    if is_ended or not token_ids:
        return calls
    fields = vars(request)
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    # A stop of the request's own may have ended it, unless it is just as long as it may be.
    may_be_stopped = fields.get("stop") or fields.get("stop_token_ids")
    if may_be_stopped and len(token_ids) not in {fields.get(limit) for limit in limits}:
        return calls
    return _UncountedCalls(calls)


class _UncountedCalls(list[FunctionCall]):
    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True
