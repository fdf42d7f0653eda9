# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla check``: every check of the fast path for one model, in one run.

``steps`` holds the steps, ``command`` runs and prints them. ``known_issues.json`` lists faults of the decode kernels.
"""
