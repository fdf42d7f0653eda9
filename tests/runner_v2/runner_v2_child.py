"""A process in which Model Runner V2's own functions build forward contexts, for our op and for stock's.

``python runner_v2_child.py FOLDER '{"kv_cache_dtype": "fp8", ...}'`` prints one JSON line: by kind of batch, what
decided and whether the outputs and the KV cache are stock's. V2's Triton kernels, and the one of AITER's metadata
builder, run through Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import vllm.triton_utils

# vLLM leaves Triton out on a CPU: what is imported from here on gets it, interpreted.
vars(vllm.triton_utils).update(triton=triton, tl=triton.language)

from runner_v2_batches import KINDS  # noqa: E402
from runner_v2_setup import Setup  # noqa: E402


def main(folder: str, options: dict) -> dict:
    """Every kind of batch, by name."""
    setup = Setup(Path(folder), **options)
    return {name: setup.compare(build(setup)) for name, build in KINDS.items()}


if __name__ == "__main__":
    with torch.inference_mode():
        print("\n" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
