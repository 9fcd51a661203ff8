"""Operations made fast for CPUs. Same contracts as kernels.reference, which the tests hold them against."""
