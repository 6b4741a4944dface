# SPDX-License-Identifier: Apache-2.0
"""Faults of what a request finds in a cache: right until something is read back."""

from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from vllm_metis.model import mamba


def shared_state() -> None:
    """Both passes of a Mamba layer keep their state in the first one's slot."""

    real = mamba.Metis16Mamba.forward

    def faulty(self: Any, hidden_states: torch.Tensor, inputs: Any, pass_index: int) -> Any:
        return real(self, hidden_states, inputs, 0)

    mamba.Metis16Mamba.forward = faulty


def foreign_prefix() -> None:
    """A hit in the prefix cache comes with the Mamba states of the first prompt that was served."""
    left: dict[int, KVCacheBlock] = {}  # by cache group, where that prompt's states lie
    real_free = MambaManager.pop_blocks_for_free
    real_find = MambaManager.find_longest_cache_hit.__func__

    def pop_blocks_for_free(self: Any, request_id: str) -> list[KVCacheBlock]:
        blocks = real_free(self, request_id)
        left.setdefault(self.kv_cache_group_id, blocks[-1])
        return blocks

    def find_longest_cache_hit(cls: Any, **arguments: Any) -> Any:
        found, length = real_find(cls, **arguments)
        if length:
            for group, blocks in zip(arguments["kv_cache_group_ids"], found, strict=True):
                blocks[-1] = left[group]
        return found, length

    MambaManager.pop_blocks_for_free = pop_blocks_for_free
    MambaManager.find_longest_cache_hit = classmethod(find_longest_cache_hit)


FAULTS = {fault.__name__: fault for fault in (shared_state, foreign_prefix)}
