"""``vllm-aiter-mla doctor``: check whether the fast path can work here, and say what prevents it.

``check`` says what a check takes and returns; ``machine`` holds the checks; ``command`` runs and prints them.
"""
