"""autotp: automatic model-rewriting parallelism for PyTorch."""
