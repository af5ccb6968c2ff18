"""CPU kernels, compiled once per instruction set and chosen when the process starts."""
