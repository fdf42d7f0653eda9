"""The benchmark of the kernel back ends on a GPU: graphs, rotated inputs, one run. Imports no vLLM of its own accord.

``python -m vllm_aiter_mla.commands.bench`` needs torch and Triton alone; ``vllm-aiter-mla bench`` is the same.
"""
