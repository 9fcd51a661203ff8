"""`python -m kernels.compile [word ...]`: compile every kernel for GPUs that need not be here, and read the machine code.

Each kernel module's `compile_cases` says which specialisations its launchers ask for at the shapes of MODEL_SHAPES, and
whether matrix instructions and 16-byte loads are intended. Exits with 1 where one is missing, on a spill and on more
shared memory than the device has. Without words everything is compiled and kernels/COMPILED.md is written; with words,
only the lines that hold them all, printed only. CUDA machine code is read with the tools in Triton's wheel, AMD's from
the assembly.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
from kernels.compile_case import HIP_STAGES, MODEL_SHAPES, CompileCase

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes per program
DTYPES = ("bf16", "fp16")
TABLE = Path(__file__).with_name("COMPILED.md")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CUDA_MATRIX = re.compile(r"\b([HIQ]G?MMA|UTC\w*MMA)\b")
CUDA_WIDE = re.compile(r"\b(?:LDG|LDGSTS)\.[\w.]*128\b|\bUTMALDG\b")
HIP_MATRIX = re.compile(r"\bv_(mfma)_\w+")
HIP_WIDE = re.compile(r"\b(?:global|buffer)_load_dwordx4\b")


@dataclass(frozen=True, slots=True)
class Report:
    target: str
    registers: int
    shared_bytes: int
    spills: int  # CUDA: bytes of stack per thread; AMD: spilled registers
    matrix: str  # the matrix instruction found, "" if none
    wide: bool

    def faults(self, case: CompileCase) -> list[str]:
        faults = [f"{self.spills} spilled"] if self.spills else []
        if self.shared_bytes > SHARED_LIMIT[self.target]:
            faults.append(f"{self.shared_bytes} bytes of shared memory, more than there are")
        if case.tensor_core and not self.matrix:
            faults.append("no matrix instruction")
        if case.wide_loads and not self.wide:
            faults.append("no 16-byte loads")
        return faults


@functools.cache
def collect() -> dict[tuple[str, str], tuple[CompileCase, tuple[str, ...]]]:
    """(dtype, key) -> the case and the models that ask for it. Cases that give the same code are one."""
    found: dict[tuple[str, str], tuple[CompileCase, tuple[str, ...]]] = {}
    for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda info: info.name):
        if info.ispkg or info.name == "compile":
            continue
        contribute = getattr(importlib.import_module(f"kernels.{info.name}"), "compile_cases", None)
        if contribute is None:
            continue
        for shape in MODEL_SHAPES:
            for dtype in DTYPES:
                for case in contribute(shape, dtype):
                    # A kernel without elements of the model's dtype is one case, whatever the dtype.
                    typed = f"*{dtype}" in case.types.values()
                    _, models = found.get((dtype if typed else "any", case.key), (case, ()))
                    models = models if shape.name in models else (*models, shape.name)
                    found[dtype if typed else "any", case.key] = (case, models)
    return found


def read_cuda(target: str, cubin: bytes, shared_bytes: int) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    matrix = CUDA_MATRIX.search(text)
    return Report(
        target=target,
        registers=int(usage["REG"]),
        shared_bytes=shared_bytes,
        spills=int(usage["STACK"]) + int(usage["LOCAL"]),
        matrix=matrix[1] if matrix else "",
        wide=bool(CUDA_WIDE.search(text)),
    )


def read_hip(target: str, assembly: str, shared_bytes: int) -> Report:
    counts = {name: int(count) for name, count in re.findall(r"\.(\w+_count): +(\d+)", assembly)}
    matrix = HIP_MATRIX.search(assembly)
    return Report(
        target=target,
        registers=counts["vgpr_count"],  # of 512, accumulation registers included
        shared_bytes=shared_bytes,
        spills=counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
        matrix=matrix[1] if matrix else "",
        wide=bool(HIP_WIDE.search(assembly)),
    )


def compile_one(found_key: tuple[str, str], target_name: str) -> Report:
    case, _ = collect()[found_key]
    target = TARGETS[target_name]
    warps, stages = case.num_warps, case.num_stages
    if target.backend == "hip":
        warps, stages = case.hip_warps or warps, min(stages, HIP_STAGES)
    source = ASTSource(case.kernel, case.signature, case.constexprs, case.attrs)
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        return read_hip(target_name, compiled.asm["amdgcn"], compiled.metadata.shared)
    return read_cuda(target_name, compiled.asm["cubin"], compiled.metadata.shared)


def render(reports: dict[tuple[str, str], dict[str, Report]]) -> str:
    lines = [
        "# Compiled kernels",
        "",
        f"Written by `make kernels-compile` (Triton {triton.__version__}, no GPU). Each cell: registers per thread / shared "
        "memory in KiB / spills, the matrix instruction found, `128` if global loads of 16 bytes per thread are there. Warps "
        "have 32 lanes, on gfx942 64; a second number is for there.",
        "",
        f"| kernel | dtype | warps | {' | '.join(TARGETS)} | models |",
        f"|---|---|---|{'---|' * len(TARGETS)}---|",
    ]
    for found_key, by_target in reports.items():
        case, models = collect()[found_key]
        cells = []
        for report in by_target.values():
            notes = [report.matrix] * bool(report.matrix) + ["128"] * report.wide
            notes += [f"**{fault}**" for fault in report.faults(case)]
            numbers = f"{report.registers} / {report.shared_bytes / 1024:.1f} / {report.spills}"
            cells.append(" ".join([numbers, *notes]))
        where = "all" if len(models) == len(MODEL_SHAPES) else ", ".join(models)
        warps = f"{case.num_warps}, {case.hip_warps}" if case.hip_warps else f"{case.num_warps}"
        lines.append(f"| {case.label} | {found_key[0]} | {warps} | {' | '.join(cells)} | {where} |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    found_keys = [
        key for key, (case, _) in collect().items() if all(word in f"{case.label} {key[0]}".split() for word in words)
    ]
    jobs = [(key, target) for key in found_keys for target in TARGETS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_one, *zip(*jobs, strict=True))) if jobs else []
    reports: dict[tuple[str, str], dict[str, Report]] = {key: {} for key in found_keys}
    for (key, target), report in zip(jobs, results, strict=True):
        reports[key][target] = report
    table = render(reports)
    print(table)
    if not words:
        TABLE.write_text(table)
    faults = [
        f"{collect()[key][0].label} {key[0]} {target}: {fault}"
        for key, by_target in reports.items()
        for target, report in by_target.items()
        for fault in report.faults(collect()[key][0])
    ]
    print(f"{len(jobs)} compilations, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults or not jobs else 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # the decorators read it when the kernel modules are imported
    sys.exit(main(sys.argv[1:]))
