"""``vllm-aiter-mla doctor``: can the fast path work on this machine, and what stands in its way.

``check`` is what a check returns and how it is run, ``guard`` keeps AITER from being imported, ``given`` reads the
options, ``machine``, ``installed``, ``switches`` and ``conflicts`` hold the checks, ``command`` is the command line.
"""
