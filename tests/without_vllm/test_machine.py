# SPDX-License-Identifier: Apache-2.0
"""What a machine's cards are, in the words that nvidia-smi has for them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

import harness.machine
from harness.evidence.environment import Card, ForeignProcess

MIB = 2**20


def _no_sensor(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _no_driver() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def _memory(_: object, version: int | None = None) -> Any:
    """An idle H200's, read on one: without a version, what the driver keeps counts as used."""
    assert version in (None, pynvml.nvmlMemory_v2)
    return SimpleNamespace(total=143771 * MIB, used=0 if version else 615 * MIB)


H200: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: object(),
    "nvmlDeviceGetName": lambda _: "NVIDIA H200",
    "nvmlSystemGetDriverVersion": lambda: "580.159.04",
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
    "nvmlDeviceGetClockInfo": lambda _, clock: 345,
    "nvmlDeviceGetMaxClockInfo": lambda _, clock: 1980,
    "nvmlDeviceGetPowerManagementLimit": lambda _: 700_000,
    "nvmlDeviceGetComputeRunningProcesses": lambda _: [
        SimpleNamespace(pid=7, usedGpuMemory=3 * MIB),
        SimpleNamespace(pid=8, usedGpuMemory=None),
    ],
    "nvmlSystemGetProcessName": lambda pid: f"/usr/bin/python{pid}",
}
"""What the driver of one H200 answers."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that puts an H200's driver in place, with some of its answers changed."""

    def put(**answers: Callable[..., Any]) -> None:
        for name, answer in (H200 | answers).items():
            monkeypatch.setattr(pynvml, name, answer)

    return put


def test_a_card_is_told_as_nvidia_smi_tells_it(driver: Callable[..., None]):
    driver()
    # nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,compute_cap,… on it
    assert harness.machine.cards() == [
        Card(
            name="NVIDIA H200",
            driver="580.159.04",
            memory_mib="143771",
            memory_used_mib="0",
            compute_capability="9.0",
            sm_clock_mhz="345",
            max_sm_clock_mhz="1980",
            power_limit_w="700.00",
        )
    ]


def test_a_sensor_that_a_card_lacks_is_not_available(driver: Callable[..., None]):
    driver(nvmlDeviceGetPowerManagementLimit=_no_sensor, nvmlDeviceGetClockInfo=_no_sensor)
    (card,) = harness.machine.cards()
    assert (card.power_limit_w, card.sm_clock_mhz) == ("[N/A]", "[N/A]")
    assert card.max_sm_clock_mhz == "1980"


def test_others_on_a_card_are_named_without_their_folder(driver: Callable[..., None]):
    driver()
    assert harness.machine.foreign_processes() == [
        ForeignProcess(name="python7", memory_mib="3"),
        ForeignProcess(name="python8", memory_mib="[N/A]"),
    ]


def test_the_memory_in_use_on_all_cards_is_summed(driver: Callable[..., None]):
    driver(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetMemoryInfo=lambda _, version: SimpleNamespace(used=5 * MIB),
    )
    assert harness.machine.cards_memory_bytes() == 10 * MIB


def test_the_free_memory_is_that_of_the_fullest_card(driver: Callable[..., None]):
    free = iter([7 * MIB, 5 * MIB])
    driver(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetMemoryInfo=lambda _, version: SimpleNamespace(free=next(free)),
    )
    assert harness.machine.cards_free_bytes() == 5 * MIB


def test_a_machine_without_a_driver_has_no_card(driver: Callable[..., None]):
    driver(nvmlInit=_no_driver)
    assert harness.machine.cards() == []
    assert harness.machine.foreign_processes() == []
    assert harness.machine.cards_memory_bytes() is None
    assert harness.machine.cards_free_bytes() is None
