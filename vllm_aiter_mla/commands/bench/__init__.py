"""``vllm-aiter-mla bench``: time the kernel back ends on a GPU. Needs torch and Triton, not vLLM.

``points`` says what is measured, ``run`` compares and times the paths, ``command`` prints.
"""
