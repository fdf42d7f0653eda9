"""A process in which Model Runner V2's own functions build forward contexts, for our op and for vLLM's own.

``python runner_v2_child.py FOLDER '{"kv_cache_dtype": "fp8", ...}'`` prints one JSON line: by kind of batch, what
decided and whether the outputs and the KV cache are vLLM's own. V2's Triton kernels, and the one of AITER's metadata
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

from tests.engine.engine_mutations import a_mixed_batch_counts_as_decode  # noqa: E402
from tests.runner_v2.runner_v2_batches import KINDS  # noqa: E402
from tests.runner_v2.runner_v2_setup import Setup  # noqa: E402


def main(folder: str, options: dict) -> dict:
    """What became of every kind of batch, and of one with a planted bug."""
    setup = Setup(Path(folder), **options)
    found = {name: setup.compare(build(setup)) for name, build in KINDS.items() if setup.drafts or "drafts" not in name}
    a_mixed_batch_counts_as_decode()
    return {"kinds": found, "planted": setup.compare(KINDS["mixed"](setup)), "page_indices": same_page_indices()}


def same_page_indices() -> bool:
    """Whether the sandbox's stand-in writes what vLLM's Triton kernel writes."""
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    from tests.sandbox.aiter_attention import PageIndices

    table = torch.arange(24, dtype=torch.int32).flip(0).view(3, 8)
    bounds = torch.tensor([0, 5, 5, 37], dtype=torch.int32)
    found = []
    for kernel in (rocm_aiter_mla._expand_page_indices_kernel, PageIndices()):
        found.append(torch.full((40,), -1, dtype=torch.int32))
        kernel[(3, 1)](found[-1], table, *table.stride(), bounds, KERNEL_BLOCK_SIZE=4, BLOCK_SIZE=1024)
    return bool(torch.equal(*found))


if __name__ == "__main__":
    with torch.inference_mode():
        print("\n" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
