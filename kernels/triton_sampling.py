"""Sampling on the Triton backend: the names of kernels.reference.sampling, each its launcher."""

from kernels.penalties import apply_bias, apply_penalties
from kernels.sampling import sample

__all__ = ["apply_bias", "apply_penalties", "sample"]
