# SPDX-License-Identifier: Apache-2.0
"""Kernel back ends: tensors in, tensors out. Nothing here imports vLLM.

``inputs`` holds the operands of a call, the contract that all back ends share, and synthetic operands. ``absorb`` is
the weight W_UK in its three formats, ``formats`` rounds to fp8 and mxfp4, ``platform`` is the table of cards.
``backend`` is the protocol of the back ends: ``reference``, ``aiter``, ``triton`` and ``vllm_own``. ``device`` is the
seam to a GPU's runtime, ``stopwatch`` times on it. ``formulas`` says what a layer launches and moves, ``distance`` is
how far a result is from the expected one.
"""
