"""``vllm-aiter-mla plan``: what would engage, from a model's config and the options of ``vllm serve`` alone.

``model`` reads the config (``fields`` its values), ``serve_options`` the options, ``status line`` asks admission,
``kernels`` the back ends, ``ranges`` vLLM for compile ranges and captured sizes, ``formulas`` counts bytes and
launches, ``build`` joins them and ``printout`` prints. Nothing here needs a GPU, weights or a network.
"""
