"""``vllm-aiter-mla doctor``: can the fast path work on this machine, and what stands in its way.

``check`` is what a check returns and how it is run, ``guard`` keeps AITER from being imported, ``machine``,
``installed``, ``switches`` and ``options`` hold the checks, ``command`` prints them. Nothing needs a GPU.
"""
