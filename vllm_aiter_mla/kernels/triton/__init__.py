"""The Triton back end: absorb BMM, RoPE, concat, fp8 quantisation and KV write in one launch.

It is written for ROCm and CUDA and has run on neither: docs/triton.md.

Callers use ``backend.TritonBackend``. Nothing here imports vLLM, and this file imports nothing at all, so that the
command line can ask for the back end's name on a machine without Triton.
"""

import os


def interpreted() -> bool:
    """Whether this process was started with TRITON_INTERPRET=1: its Triton kernels then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
