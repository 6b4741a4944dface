# SPDX-License-Identifier: Apache-2.0
"""What torch.compile generated, read for a race.

A thread may load what another one stored in the same kernel before it is there: nothing orders the
two but barriers, and a compiler that splits one operation into two loops over a row relies on one
that happens to stand between them. So no kernel may load a buffer after it stored to it. Needs neither
torch nor vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# `def name(buffers):` and the body up to the next definition or the end of the quoted source.
_KERNEL = re.compile(r"^def (triton_\w+)\(.*?\):\n(.*?)(?=^def |^'''|\Z)", re.MULTILINE | re.DOTALL)
_ACCESS = re.compile(r"\btl\.(load|store|atomic_\w+)\(\s*(?:tl\.make_block_ptr\(\s*)?(\w+)")


def kernels(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and body of each Triton kernel in a module that torch.compile wrote."""
    for match in _KERNEL.finditer(source):
        yield match[1], match[2]


def reloaded(body: str) -> list[str]:
    """Return the buffers that a kernel loads after it stored to them, in the order of its lines."""
    stored: set[str] = set()
    found: list[str] = []
    for access, buffer in _ACCESS.findall(body):
        if access != "load":
            stored.add(buffer)
        elif buffer in stored and buffer not in found:
            found.append(buffer)
    return found
