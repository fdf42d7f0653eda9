# SPDX-License-Identifier: Apache-2.0
"""The Triton back end: absorb BMM, RoPE, concat, fp8 quantisation and KV write in one launch.

It is written for ROCm and CUDA. It has run on an NVIDIA H200, and on no AMD card: docs/kernels.md.

``kernel`` is the kernel, ``launcher`` launches it, ``tiles`` chooses its tile, ``backend`` says which calls it takes.
Nothing here imports vLLM. ``backend`` and ``tiles`` do not import Triton, so that `plan` runs without it.
"""

import os


def interpreted() -> bool:
    """Return whether this process was started with TRITON_INTERPRET=1: its Triton kernels then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
