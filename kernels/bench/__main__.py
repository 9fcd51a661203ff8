"""`python -m kernels.bench [word ...]`: time against floor, per operation and cell whose line holds all the words.

On a GPU every cell is first checked in bf16 against the reference with fresh random inputs; a wrong cell is not timed
and makes the exit status 1. Without a GPU: the floors.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import torch

from kernels import bench
from kernels.bench.harness import DEVICES, Cell, median_s, this_device


def all_cells() -> Iterator[Cell]:
    for info in sorted(pkgutil.iter_modules(bench.__path__), key=lambda info: info.name):
        if not info.name.startswith("__"):
            module = importlib.import_module(f"kernels.bench.{info.name}")
            if hasattr(module, "cells"):
                yield from module.cells()


def print_floors(cells: list[Cell]) -> None:
    print("No GPU here: nothing measured. Floors in µs from bytes and FLOPs at data-sheet peaks:\n")
    print(f"{'operation':<16} {'cell':<56} {'MB':>9} " + " ".join(f"{d.name:>8}" for d in DEVICES))
    for cell in cells:
        floors = " ".join(f"{cell.floor_s(d) * 1e6:8.2f}" for d in DEVICES)
        print(f"{cell.operation:<16} {cell.label:<56} {cell.bytes_moved / 1e6:9.2f} {floors}")


def measure(cells: list[Cell]) -> int:
    """Print the table; return the number of wrong cells."""
    device = this_device()
    assert device is not None
    wrong = 0
    print(f"{device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.flop_rate / 1e12:.0f} TFLOP/s at peak; bf16\n")
    print(f"{'operation':<16} {'cell':<56} {'µs':>9} {'MB':>9} {'%bw':>6} {'%flop':>6} {'x floor':>8}")
    for cell in cells:
        run = cell.prepare(torch.device("cuda"))
        error = run.error()
        if not error <= 1:  # NaN is wrong too
            wrong += 1
            print(f"{cell.operation:<16} {cell.label:<56} WRONG: {error:.3g} times the tolerance", flush=True)
            continue
        seconds = median_s(run.launch)
        bandwidth = 100 * cell.bytes_moved / seconds / device.bandwidth
        flop_rate = 100 * cell.flops / seconds / device.flop_rate
        print(
            f"{cell.operation:<16} {cell.label:<56} {seconds * 1e6:9.1f} {cell.bytes_moved / 1e6:9.2f} "
            f"{bandwidth:6.1f} {flop_rate:6.1f} {seconds / cell.floor_s(device):8.2f}",
            flush=True,
        )
    return wrong


def main(words: list[str]) -> int:
    cells = [cell for cell in all_cells() if all(word in f"{cell.operation} {cell.label}" for word in words)]
    if not torch.cuda.is_available():
        print_floors(cells)
        return 0
    return 1 if measure(cells) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
