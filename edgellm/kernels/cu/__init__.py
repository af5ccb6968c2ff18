"""CUDA operators: one wrapper module an op beside its device source.  Importable on machines without a GPU."""
