"""``vllm-aiter-mla doctor``: can the fast path work on this machine, and what stands in its way.

``check`` is what a check returns and how it is run, ``guard`` keeps AITER from being imported, ``machine``,
``installed``, ``switches`` and ``options`` hold the checks, ``arguments`` and ``knobs`` read the given options,
``command`` prints the findings. Nothing needs a GPU.
"""
