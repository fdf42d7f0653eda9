# SPDX-License-Identifier: Apache-2.0
"""Steps that a worker takes once, after its weights are loaded.

``first_call`` marks the first calls of a kernel. ``checks`` checks the kernels of each layer shape, and ``comparison``
compares one kernel with the reference. ``prefill`` checks vLLM's rotation of prefill rows, and compiles vLLM's
quantisation of them. ``timing`` times the kernels and lets the ranks agree. ``kept_figures`` keeps the figures for the
next start.
"""
