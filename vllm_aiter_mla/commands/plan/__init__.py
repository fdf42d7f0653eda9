"""``vllm-aiter-mla plan``: what would engage, from a model's config and the options of ``vllm serve``.

``model`` finds the config and asks vLLM in a process of its own (``compat.rocm_config``). ``outcome`` asks admission
for every reason, ``kernels`` asks the back ends, ``formulas`` counts bytes and launches, ``build`` joins the answers,
and ``printout`` prints them. Nothing here needs a GPU, weights or a network.
"""
