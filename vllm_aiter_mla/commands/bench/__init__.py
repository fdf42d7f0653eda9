"""``vllm-aiter-mla bench``: the kernel back ends timed on a GPU. Needs torch and Triton, and no vLLM.

``points`` is what is measured, ``paths`` by whom, ``timing`` how, ``run`` joins them, ``page`` prints.
"""
