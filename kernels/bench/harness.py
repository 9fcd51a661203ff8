"""Cells, floors, timing. Each module beside this one defines `cells() -> Iterator[Cell]`; that is its registration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks from the vendor's data sheet: memory in bytes/s, dense bf16 matrix rate in FLOP/s."""

    name: str
    bandwidth: float
    flop_rate: float


# Matched against torch.cuda.get_device_name() in this order.
DEVICES = (
    Device("B200", 8.0e12, 2.25e15),
    Device("H200", 4.8e12, 989e12),
    Device("H100", 3.35e12, 989e12),
    Device("A100", 2.04e12, 312e12),
    Device("MI300X", 5.3e12, 1307e12),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A cell made ready on the device with fresh random inputs."""

    launch: Callable[[], object]  # what is timed
    error: Callable[[], float]  # launches on copies; the worst error as a share of the tolerance, <= 1 is right


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table. `bytes_moved` is what must cross the memory bus at least once; floors follow from it."""

    operation: str
    label: str
    bytes_moved: int
    flops: int
    prepare: Callable[[torch.device], Run]

    def floor_s(self, device: Device) -> float:
        return max(self.bytes_moved / device.bandwidth, self.flops / device.flop_rate)


def this_device() -> Device | None:
    """The GPU at hand, None without one. An unknown GPU's peaks are infinite: shares read 0 %, times are right."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((d for d in DEVICES if d.name in name), Device(name, float("inf"), float("inf")))


def median_s(launch: Callable[[], object], repeats: int = 30) -> float:
    """Median seconds of one launch on the GPU, each after a write that sweeps the L2 cache: a layer's weights are cold
    when its turn comes. The sweep also keeps the GPU behind the CPU, so that launch overhead is not timed."""
    sweep = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        launch()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        sweep.zero_()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = sorted(start.elapsed_time(end) for start, end in events)
    return milliseconds[repeats // 2] / 1e3
