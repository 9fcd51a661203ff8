"""What a kernel file says about its own compilation, so that `kernels.compile` can prove it without a GPU.

Each kernel file defines `compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]`; that is its registration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The widths of one model, or of one tensor-parallel share of it."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool = False

    @property
    def lora_groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Group -> (input features, output features of each slice)."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


MODEL_SHAPES = (
    ModelShape("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
    ModelShape("Llama-3-70B/8", 8192, 3584, 8, 1, 128, 16032),
    ModelShape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936, qk_norm=True),
    ModelShape("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152),
)


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of one kernel, as its launcher would ask for it.

    `types` names the argument types that are not plain `i32` integers ("*bf16", "*i32", "fp32", ...). Every pointer and
    integer is taken to be divisible by 16, as it is at these shapes, but for those in `unaligned`.
    """

    label: str
    kernel: Any  # the @triton.jit function
    types: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int  # of 32 lanes
    num_stages: int
    tensor_core: bool = False  # matrix instructions must be in the machine code
    wide_loads: bool = False  # so must loads of 16 bytes per thread
    unaligned: tuple[str, ...] = ()
    hip_warps: int | None = None  # of 64 lanes, where the launcher asks for another number there

    @property
    def signature(self) -> dict[str, str]:
        return {
            name: "constexpr" if name in self.constexprs else self.types.get(name, "i32")
            for name in self.kernel.arg_names
        }

    @property
    def attrs(self) -> dict[tuple[int], list[list[Any]]]:
        """Triton's form of "divisible by 16", by argument position."""
        return {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(self.signature.items())
            if name not in self.unaligned and (kind.startswith("*") or kind in ("i32", "i64"))
        }

    @property
    def key(self) -> str:
        """Equal for cases that compile to the same code."""
        options = (self.num_warps, self.hip_warps, self.num_stages, self.unaligned)
        return repr((self.kernel.__name__, self.signature, sorted(self.constexprs.items()), options))


CUDA_LANES, HIP_LANES = 32, 64  # of a warp
LANES = HIP_LANES if torch.version.hip else CUDA_LANES
HIP_STAGES = 2  # AMD keeps a stage in registers and one buffer of 64 KB: deeper pipelines do not fit


def pipeline_stages(wanted: int, dtype: torch.dtype) -> int:
    """`num_stages` for a launcher: `wanted` holds for 2-byte elements; fp32 tiles take twice the shared memory."""
    stages = max(1, wanted * 2 // dtype.itemsize)
    return min(stages, HIP_STAGES) if torch.version.hip else stages
