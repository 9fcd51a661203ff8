"""The compile proof itself: it reads real machine code, and it fails where it must."""

import os
import subprocess
import sys

from kernels.compile import Report, read_hip
from kernels.compile_case import MODEL_SHAPES, CompileCase

CASE = CompileCase("case", None, {}, {}, num_warps=4, num_stages=2, tensor_core=True, wide_loads=True)
AMD = """
    v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0
    global_load_dwordx4 v[0:3], v4, s[0:1]
    .sgpr_spill_count: 0
    .vgpr_count:     70
    .vgpr_spill_count: 2
"""


def test_faults_name_what_is_wrong() -> None:
    assert Report("sm_80", 40, 0, 0, "HMMA", True).faults(CASE) == []
    assert Report("sm_80", 255, 0, 8, "", False).faults(CASE) == [
        "8 spilled",
        "no matrix instruction",
        "no 16-byte loads",
    ]
    assert Report("gfx942", 40, 65536, 0, "mfma", True).faults(CASE) == []
    assert Report("gfx942", 40, 65537, 0, "mfma", True).faults(CASE) == [
        "65537 bytes of shared memory, more than there are"
    ]


def test_reads_amd_assembly() -> None:
    assert read_hip("gfx942", AMD, 1024) == Report("gfx942", 70, 1024, spills=2, matrix="mfma", wide=True)


def test_lora_groups_follow_the_head_counts() -> None:
    assert MODEL_SHAPES[1].lora_groups["qkv"] == (8192, (1024, 128, 128))


def test_a_kernel_compiles_for_every_target() -> None:
    """In a process of its own: this one's kernels are bound to the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.compile", "expand", "rows=16", "parts=1", "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 compilations, 0 faults" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("| expand"))
    assert row.count("HMMA 128") == 3 and row.count("mfma 128") == 1
