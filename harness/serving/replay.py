# SPDX-License-Identifier: Apache-2.0
"""Replay: vLLM's own serving layer over sampled tokens that are written down.

Everything is vLLM's but the engine: the handlers of the API, the renderer with the chat template, the
parsers as the server composes them, the detokenizer. So what a client gets for a turn is known
without running a model, in every delta size: the number of tokens that vLLM streams at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionChunk
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

import vllm_metis
from harness.serving.answers import Answer, Assembly, ProtocolError, answers

WHOLE = 0
"""The delta size of a response that is not streamed."""
ALL = 1 << 30
"""The delta size of a stream that brings all tokens at once."""
MODEL = "replay"
"""The name under which the handlers serve the model."""
END_IDS = frozenset({0, 4})
"""The tokens that end a turn, as the release's generation_config.json lists them."""


class ReplayError(RuntimeError):
    """vLLM refused the request, or its stream broke the protocol; the message says how."""


class ScriptedEngine:
    """Stands for vLLM's engine client: the tokens it samples are given beforehand.

    Attributes:
        script: the tokens of each choice of the next request.
        delta_sizes: how many of them come at once when the request is streamed, again and again.
        asked: the arguments with which the last request reached the engine.
    """

    errored = False
    input_processor = None

    def __init__(self, folder: Path) -> None:
        vllm_metis.register()
        arguments = EngineArgs(str(folder), enforce_eager=True, kv_cache_memory_bytes=1 << 28)
        self.vllm_config = arguments.create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.tokenizer = self.renderer.get_tokenizer()
        self.script: Sequence[Sequence[int]] = ()
        self.delta_sizes: Sequence[int] = (ALL,)
        self.asked: dict[str, Any] = {}

    def check_admission(self, n: int) -> None:
        pass

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        self.asked = {"prompt": prompt, "sampling_params": sampling_params, **options}
        prompt_ids = prompt["prompt_token_ids"]
        streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        choices = [
            self._outputs(n, token_ids, prompt_ids, sampling_params)
            for n, token_ids in enumerate(self.script)
        ]
        if not streamed:
            choices = [iter([_merged(list(outputs))]) for outputs in choices]
        for outputs in itertools.zip_longest(*choices):
            present = [output for output in outputs if output is not None]
            for some in [[output] for output in present] if streamed else [present]:
                yield RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=prompt_ids,
                    prompt_logprobs=None,
                    outputs=some,
                    finished=False,
                )

    def _outputs(
        self,
        index: int,
        token_ids: Sequence[int],
        prompt_ids: list[int],
        sampling_params: SamplingParams,
    ) -> Iterator[CompletionOutput]:
        """Yield a choice's outputs as vLLM's output processor makes them."""
        detokenizer = IncrementalDetokenizer.from_new_request(
            self.tokenizer,
            EngineCoreRequest(
                request_id="replay",
                prompt_token_ids=prompt_ids,
                mm_features=None,
                sampling_params=sampling_params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
        )
        tokens = iter(token_ids[: sampling_params.max_tokens])
        pieces = (
            list(itertools.islice(tokens, size)) for size in itertools.cycle(self.delta_sizes)
        )
        new, following = next(pieces), next(pieces)
        while True:
            last = not following
            ended = last and new[-1] in END_IDS
            stop_string = detokenizer.update(new, ended)
            finish_reason = "stop" if ended or stop_string else "length" if last else None
            yield CompletionOutput(
                index=index,
                text=detokenizer.get_next_output_text(finish_reason is not None, delta=True),
                token_ids=new,
                cumulative_logprob=None,
                logprobs=None,
                finish_reason=finish_reason,
                stop_reason=stop_string,
            )
            if finish_reason:
                return
            new, following = following, next(pieces)


def _merged(outputs: list[CompletionOutput]) -> CompletionOutput:
    """Return the one output of a request that is not streamed."""
    last = outputs[-1]
    last.text = "".join(output.text for output in outputs)
    last.token_ids = [token_id for output in outputs for token_id in output.token_ids]
    return last


class Replay:
    """The handlers of a server whose engine is scripted.

    Args:
        engine: the scripted engine.
        reasoning_parser, tool_parser: as on the command line of `vllm serve`; "" for none.

    Attributes:
        chat, responses, messages: vLLM's handlers of the three APIs.
    """

    def __init__(
        self,
        engine: ScriptedEngine,
        reasoning_parser: str = "metis",
        tool_parser: str = "metis",
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        models = OpenAIServingModels(engine, [BaseModelPath(name=MODEL, model_path=MODEL)])
        parsers: dict[str, Any] = {
            "reasoning_parser": reasoning_parser,
            "tool_parser": tool_parser or None,
            "enable_auto_tools": bool(tool_parser),
        }
        common: dict[str, Any] = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            **parsers,
        }
        trusting = common | {"trust_request_chat_template": True}
        renderer = OnlineRenderer(engine.model_config, engine.renderer, **trusting)
        self.chat = OpenAIServingChat(
            engine, models, "assistant", online_renderer=renderer, **trusting
        )
        self.responses = OpenAIServingResponses(engine, models, renderer, **common)
        self.messages = AnthropicServingMessages(
            engine, models, "assistant", online_renderer=renderer, **common
        )

    def answers(
        self,
        request: dict[str, Any],
        script: Sequence[Sequence[int]],
        delta_size: int | Sequence[int] = WHOLE,
    ) -> list[Answer]:
        """Return the choices of a chat completion in which the scripted tokens are sampled.

        Args:
            request: the body of the request without model, stream and n.
            script: the tokens of each choice.
            delta_size: WHOLE, or the number of tokens that are streamed at once; several numbers
                take turns.
        Raises:
            ReplayError: vLLM answered with an error, or a stream broke the protocol.
        """
        self.engine.script = script
        sizes = (delta_size,) if isinstance(delta_size, int) else delta_size
        self.engine.delta_sizes = [size or 1 for size in sizes]
        body = {"model": MODEL, "n": len(script), "stream": sizes != (WHOLE,), **request}
        try:
            return asyncio.run(self._answers(ChatCompletionRequest.model_validate(body)))
        except ProtocolError as error:
            raise ReplayError(str(error)) from error
        except (VLLMClientError, ValidationError) as error:
            raise ReplayError(f"vLLM refused the request: {error}") from error

    async def _answers(self, request: ChatCompletionRequest) -> list[Answer]:
        response = await self.chat.create_chat_completion(request)
        if isinstance(response, ErrorResponse):
            raise ReplayError(f"vLLM refused the request: {response.error.message}")
        if not request.stream:
            return answers(response)
        assembly = Assembly()
        async for line in response:
            data = line.removeprefix("data: ").strip()
            if data == "[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise ReplayError(f"vLLM ended the stream: {chunk['error']['message']}")
            assembly.add(ChatCompletionChunk.model_validate(chunk))
        return assembly.answers()
