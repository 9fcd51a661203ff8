"""The models: one file per family, written in the operations of kernels.ops."""
