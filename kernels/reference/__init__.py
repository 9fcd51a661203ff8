"""Every operation in plain torch: the definition the kernels are tested against."""
