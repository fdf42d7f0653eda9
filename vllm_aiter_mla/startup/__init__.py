# SPDX-License-Identifier: Apache-2.0
"""What happens once in a worker, after its weights are loaded.

``first_call`` marks the first calls of a kernel. ``checks`` checks the kernels of each layer shape, and ``comparison``
compares one of them with the reference. ``prefill`` looks at what vLLM's own functions do to prefill rows. ``timing``
times the kernels and lets the ranks agree; ``kept_figures`` keeps the figures for the next start.
"""
