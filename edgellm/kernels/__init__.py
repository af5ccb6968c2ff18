"""Operations on device memory: one name an operation, in compiled, device and reference form."""
