# SPDX-License-Identifier: Apache-2.0
"""What the machine is: its processor and its cards, told without torch or vLLM."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cpuinfo
import pynvml

from harness.evidence.environment import Card, ForeignProcess, Machine

_UNKNOWN = "[N/A]"  # as nvidia-smi has it
_MIB = 2**20


def machine() -> Machine:
    """Return what the computer is, its cards left out."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux alone
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=processor(),
        cores=len(affinity(0)) if affinity else os.cpu_count(),
    )


@functools.cache
def processor() -> str:
    """Return the processor's name; asking takes a second, so it is asked once."""
    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.processor() or "unknown")


def cards() -> list[Card]:
    """Return the CUDA devices of this machine and how they are set at this moment."""
    with _devices() as devices:
        return [_card(device) for device in devices]


def foreign_processes() -> list[ForeignProcess]:
    """Return who holds memory of a card."""
    with _devices() as devices:
        return [
            ForeignProcess(
                name=Path(str(_told(pynvml.nvmlSystemGetProcessName, one.pid))).name,
                memory_mib=_UNKNOWN if one.usedGpuMemory is None else _mib(one.usedGpuMemory),
            )
            for device in devices
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        ]


def cards_memory_bytes() -> int | None:
    """Return the memory in use on all cards, whoever uses it; None without a card."""
    with _devices() as devices:
        used = [int(_memory(device).used) for device in devices]
        return sum(used) if used else None


def cards_free_bytes() -> int | None:
    """Return the memory that is free on the fullest card; None without a card."""
    with _devices() as devices:
        return min((int(_memory(device).free) for device in devices), default=None)


@contextmanager
def _devices() -> Iterator[list[Any]]:
    """Yield a handle for each card; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()


def _card(device: Any) -> Card:
    memory = _memory(device)
    capability = _told(pynvml.nvmlDeviceGetCudaComputeCapability, device)
    limit_mw = _told(pynvml.nvmlDeviceGetPowerManagementLimit, device)
    clock = pynvml.NVML_CLOCK_SM
    return Card(
        name=str(pynvml.nvmlDeviceGetName(device)),
        driver=str(pynvml.nvmlSystemGetDriverVersion()),
        memory_mib=_mib(memory.total),
        memory_used_mib=_mib(memory.used),
        compute_capability=capability if capability == _UNKNOWN else "{}.{}".format(*capability),
        sm_clock_mhz=str(_told(pynvml.nvmlDeviceGetClockInfo, device, clock)),
        max_sm_clock_mhz=str(_told(pynvml.nvmlDeviceGetMaxClockInfo, device, clock)),
        power_limit_w=limit_mw if limit_mw == _UNKNOWN else f"{limit_mw / 1000:.2f}",
    )


def _memory(device: Any) -> Any:
    """Return the card's memory as nvidia-smi tells it: what the driver keeps for itself is not in use."""
    return pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)


def _told(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the driver says, or that it does not: not every card has every sensor."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return _UNKNOWN


def _mib(count: int) -> str:
    return str(int(count) // _MIB)
