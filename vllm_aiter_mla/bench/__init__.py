"""The benchmark of the kernel back ends on a GPU: graphs, rotated inputs, one run. Imports no vLLM of its own accord.

``python -m vllm_aiter_mla.bench`` needs torch and Triton and nothing else; ``vllm-aiter-mla bench`` is the same.
"""
