# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla doctor``: check whether the fast path can work here, and say what prevents it.

``machine`` holds the checks; ``command`` runs and prints them.
"""
