# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors under the training runtime's names, however the release spells them.

Read independently of the plugin's loader, so that what vLLM holds can be held against it. Tensors
are read one at a time, and of stacked experts one expert, so 20 GB need not fit in memory.

Source: docs/model.md, "Checkpoint tensors".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from harness.reference.configuration_metis16 import Metis16Config
from harness.reference.modeling_metis16 import UNUSED_TENSORS

_END = r"(?=\.|$)"
_SPELLINGS = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.", ""),
        (r"^embed(?:_tokens|dings)" + _END, "embedding"),
        (
            r"\.mixer\.(?:impl\.)?(?:mixer\.)?"
            r"(in_proj|conv1d|norm|out_proj|dt_bias|A_log|D)" + _END,
            r".mixer.impl.mixer.\1",
        ),
        (r"\.mixer\.qkv_proj" + _END, ".mixer.qkv"),
        (r"\.mixer\.o_proj" + _END, ".mixer.out"),
        (r"\.moe\.experts" + _END, ".moe.local_experts"),
        (r"\.gate_up_proj" + _END, ".gate_up"),
        (r"\.down_proj" + _END, ".down"),
        # Stacked experts may be stored without `.weight`.
        (r"(\.local_experts\.(?:gate_up|gate_proj|up_proj|down))(_scale)?$", r"\1.weight\2"),
    )
]
_UNUSED = re.compile("|".join((*UNUSED_TENSORS, r"(?:^|\.)ngram_memory\.")))
_PARTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"(.*\.local_experts)\.(\d+)\.(.*)")


class StoredWeights:
    """The tensors of one checkpoint.

    Attributes:
        values: config.json.
        config: the sizes in it, read by the reference's own configuration.
        read: names in the checkpoint of what was read so far.
    """

    def __init__(self, folder: Path):
        self.values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config = Metis16Config(**self.values)
        self.read: set[str] = set()
        self._files: dict[str, Any] = {}  # by the name in the checkpoint
        self._stored_name: dict[str, str] = {}  # by the training runtime's name
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = file
                self._stored_name[_training_name(name)] = name

    def __contains__(self, name: str) -> bool:
        expert = _EXPERT.fullmatch(name)
        return (
            name in self._stored_name
            or (expert is not None and f"{expert[1]}.{expert[3]}" in self._stored_name)
            or any(all(part in self for part in parts) for parts in _parts(name))
        )

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name, put together from its parts where it is stored apart.

        Raises:
            KeyError: the checkpoint has it in no spelling.
        """
        if name in self._stored_name:
            return self._read(self._stored_name[name])
        expert = _EXPERT.fullmatch(name)
        if expert is not None and f"{expert[1]}.{expert[3]}" in self._stored_name:
            return self._read(self._stored_name[f"{expert[1]}.{expert[3]}"], int(expert[2]))
        for parts in _parts(name):
            return torch.cat([self[part] for part in parts])
        raise KeyError(name)

    def unread(self) -> list[str]:
        """Return what was never read, without the heads that Metis-1.6 does not use."""
        return sorted(
            stored
            for name, stored in self._stored_name.items()
            if stored not in self.read and not _UNUSED.search(name)
        )

    def _read(self, stored: str, expert: int | None = None) -> Tensor:
        self.read.add(stored)
        if expert is None:
            tensor: Tensor = self._files[stored].get_tensor(stored)
            return tensor
        one: Tensor = self._files[stored].get_slice(stored)[expert]
        return one


def _training_name(stored: str) -> str:
    for pattern, name in _SPELLINGS:
        stored = pattern.sub(name, stored)
    return stored


def _parts(name: str) -> list[list[str]]:
    """Names of the tensors that a fused one may be stored as; none where it is not fused."""
    return [
        [name.replace(f".{whole}.", f".{part}.") for part in parts]
        for whole, parts in _PARTS.items()
        if f".{whole}." in name
    ]
