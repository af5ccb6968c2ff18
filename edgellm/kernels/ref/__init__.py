"""References of the kernels, written for obviousness."""
