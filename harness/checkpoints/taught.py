# SPDX-License-Identifier: Apache-2.0
"""A tiny model that really talks: the reference, overfitted on the scripted conversations.

Random weights never close a think block or write a call. These do, by heart, so that a serving test
through the true engine, grammar and detokenizer has a known right answer. Teaching takes minutes on
two cores, so its result is kept in a cache, under a hash of all that it depends on.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from harness.checkpoints import layout
from harness.checkpoints.layout import draw, release_layout
from harness.checkpoints.tokenizer import read_tokenizer, write_tokenizer
from harness.files import kept_folder
from harness.prompts.conversations import Turn, conversations
from harness.reference import configuration_metis16, modeling_metis16, sublayers_metis16
from harness.reference.configuration_metis16 import Metis16Config
from harness.reference.modeling_metis16 import Metis16ForCausalLM

# Ways to ask for a turn that must not change its answer: as scripted, with strict tools, without
# declaring the tools, and after a system message.
SETTINGS = ("scripted", "strict", "undeclared", "system")

# Smallest lead of the right token over the next one, in logits, over all turns and settings. A
# taught model has 4; BF16 arithmetic moves logits by up to 0.8.
MIN_MARGIN = 1.0

_EPOCHS = 26
_TOKENS_PER_BATCH = 800
_LEARNING_RATE = 2e-3
_WARM_UP_STEPS = 20
# Taken off the right token's logit in the loss, so that being right by less costs.
_LOSS_MARGIN = 3.0
_IGNORED, _PADDING = -100, 1

# What the weights depend on besides the lessons, which stand for script, tokenizer and template.
_CODE = (configuration_metis16, sublayers_metis16, modeling_metis16, layout, sys.modules[__name__])


class TeachingError(RuntimeError):
    """The model did not learn its script; the message lists the turns that it gets wrong."""


@dataclass(frozen=True)
class Lesson:
    """One turn in one setting, as token ids."""

    name: str
    prompt: list[int]
    answer: list[int]


def taught_weights(
    values: dict[str, Any], seed: int = 0, cache: Path | None = None
) -> dict[str, Tensor]:
    """Return every tensor of the release's layout, taught, in FP32 with BF16's values.

    Args:
        values: the sizes, as config.json names them; small ones, as all of it is trained.
        seed: of the weights that teaching starts from, and of its order.
        cache: the folder of earlier results; METIS_CACHE or ~/.cache/vllm-metis where left out.
    Raises:
        TeachingError: an answer is not reproduced with the margin wanted.
    """
    cache = cache or kept_folder()
    cache.mkdir(parents=True, exist_ok=True)
    lessons = _all_lessons(values["vocab_size"])
    path = cache / f"taught-{_fingerprint(values, seed, lessons)}.safetensors"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            print(f"teaching a model its script (minutes, once) into {path}", file=sys.stderr)
            scratch = path.with_suffix(f".{os.getpid()}")
            save_file(_teach(values, seed, lessons), scratch)
            os.replace(scratch, path)
    return load_file(path)


def lessons_of(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[Lesson]:
    """Return the turn in every setting, rendered as a server renders it."""
    return [_lesson(turn, setting, tokenizer) for setting in SETTINGS]


@torch.no_grad()
def margins(model: Metis16ForCausalLM, lessons: list[Lesson]) -> dict[str, float]:
    """Return each lesson's smallest lead of the right token, in logits; negative where it fails."""
    found: dict[str, float] = {}
    for batch in _batches(lessons):
        leads = _margin(*_answer_logits(model, *_collate(batch)))
        of_lesson = leads.split([len(lesson.answer) for lesson in batch])
        found |= {one.name: lead.min().item() for one, lead in zip(batch, of_lesson, strict=True)}
    return {lesson.name: found[lesson.name] for lesson in lessons}


def _all_lessons(vocab_size: int) -> list[list[Lesson]]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size)
        tokenizer = read_tokenizer(folder)
    return [lessons_of(turn, tokenizer) for turn in conversations()]


def _fingerprint(values: dict[str, Any], seed: int, lessons: list[list[Lesson]]) -> str:
    content = [values, seed, [[asdict(one) for one in settings] for settings in lessons]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for module in _CODE:
        digest.update(Path(inspect.getfile(module)).read_bytes())
    return digest.hexdigest()[:16]


def _lesson(turn: Turn, setting: str, tokenizer: PreTrainedTokenizerBase) -> Lesson:
    messages, tools = list(turn.messages), copy.deepcopy(turn.tools)
    if setting == "system":
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    if setting == "undeclared":
        tools = []
    if setting == "strict":
        for tool in tools:
            tool["function"]["strict"] = True

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            [_with_parsed_arguments(message) for message in messages],
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **turn.chat_template_kwargs,
        )

    prompt = render(messages, True)
    text = turn.text
    if text is None:
        whole = render([*messages, turn.message], False)
        if not whole.startswith(prompt):
            raise ValueError(
                f"{turn.id}: the chat template renders the answer under another prompt"
            )
        text = whole.removeprefix(prompt)
    encode = tokenizer.encode
    return Lesson(
        f"{turn.id} ({setting})",
        encode(prompt, add_special_tokens=False),
        encode(text, add_special_tokens=False),
    )


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates get arguments as an object, though messages carry them as JSON text."""
    calls = copy.deepcopy(message.get("tool_calls", []))
    for call in calls:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message | ({"tool_calls": calls} if calls else {})


def _teach(values: dict[str, Any], seed: int, lessons: list[list[Lesson]]) -> dict[str, Tensor]:
    # A shorter scan chunk: the same result, but for rounding, with less work.
    config = Metis16Config(**values | {"mamba_chunk_size": 64})
    drawn = {spec.name: draw(spec, seed) for spec in release_layout(config)}
    model = Metis16ForCausalLM(config)
    model.load_state_dict(drawn | {"lm_head.weight": drawn["embedding.weight"]}, strict=False)
    _train(model, lessons, random.Random(seed))

    taught = drawn | model.state_dict()
    for spec in release_layout(config):
        if not spec.fp32:
            taught[spec.name] = taught[spec.name].bfloat16().float()
    del taught["lm_head.weight"]  # tied: the embedding
    model.load_state_dict(taught, strict=False)
    _check(model, [lesson for settings in lessons for lesson in settings])
    return taught


def _train(model: Metis16ForCausalLM, lessons: list[list[Lesson]], rng: random.Random) -> None:
    """Train in place, each epoch on every turn in one setting, drawn anew."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    batches = []
    for _ in range(_EPOCHS):
        epoch = _batches([rng.choice(settings) for settings in lessons])
        batches += rng.sample(epoch, len(epoch))
    progress = tqdm(batches, desc="teaching", unit="step", disable=None)
    for step, batch in enumerate(progress):
        rate = min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 - step / len(batches))
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * rate
        logits, right = _answer_logits(model, *_collate(batch))
        handicap = logits.new_full((len(right), 1), -_LOSS_MARGIN)
        loss = F.cross_entropy(logits.scatter_add(1, right[:, None], handicap), right)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")


def _check(model: Metis16ForCausalLM, lessons: list[Lesson]) -> None:
    found = margins(model, lessons)
    wrong = [f"{name}: {margin:.2f}" for name, margin in found.items() if margin < MIN_MARGIN]
    if wrong:
        listed = "\n  ".join(wrong)
        raise TeachingError(
            f"{len(wrong)} of {len(found)} lessons lead by less than {MIN_MARGIN} in logits; "
            f"another seed or more epochs may help:\n  {listed}"
        )


def _batches(lessons: list[Lesson]) -> list[list[Lesson]]:
    """Return lessons of similar length together."""
    batches: list[list[Lesson]] = [[]]
    for lesson in sorted(lessons, key=_length):
        if (len(batches[-1]) + 1) * _length(lesson) > _TOKENS_PER_BATCH and batches[-1]:
            batches.append([])
        batches[-1].append(lesson)
    return batches


def _length(lesson: Lesson) -> int:
    return len(lesson.prompt) + len(lesson.answer)


def _collate(lessons: list[Lesson]) -> tuple[Tensor, Tensor]:
    """Return ids and labels (B, T); padding on the right reaches no token before it."""
    longest = max(map(_length, lessons))
    ids = torch.full((len(lessons), longest), _PADDING)
    labels = torch.full_like(ids, _IGNORED)
    for row, lesson in enumerate(lessons):
        ids[row, : _length(lesson)] = torch.tensor(lesson.prompt + lesson.answer)
        labels[row, len(lesson.prompt) : _length(lesson)] = torch.tensor(lesson.answer)
    return ids, labels


def _answer_logits(model: Metis16ForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (n, V) and the right token (n,) at every position of the answers."""
    wanted = labels[:, 1:] != _IGNORED
    return model(ids).logits[:, :-1][wanted], labels[:, 1:][wanted]


def _margin(logits: Tensor, right: Tensor) -> Tensor:
    best_other = logits.scatter(1, right[:, None], -torch.inf).amax(-1)
    return logits.gather(1, right[:, None])[:, 0] - best_other
