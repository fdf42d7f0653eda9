"""Kernel back ends: tensors in, tensors out. Nothing here imports vLLM."""
