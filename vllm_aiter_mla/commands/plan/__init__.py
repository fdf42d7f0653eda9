"""``vllm-aiter-mla plan``: what would engage, from a model's config and the options of ``vllm serve`` alone.

``model`` reads the config, ``options`` the options, ``verdict`` asks admission, ``kernels`` asks the back ends,
``vllm_rules`` asks vLLM for ranges and capture sizes, ``formulas`` counts bytes and launches, ``build`` joins them and
``page`` prints. Nothing here needs a GPU, weights or a network.
"""
