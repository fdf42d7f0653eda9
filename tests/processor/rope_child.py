"""Prints, as JSON, which kernels this process loads and how many values of vLLM's RoPE differ from the reference."""

import json
from pathlib import Path

import torch
from vllm import _custom_ops

from tests.sandbox import gpu_ops
from vllm_aiter_mla.kernels.reference import gather_cos_sin, rotate


def differences(is_neox: bool) -> int:
    """Values of a bf16 query and key that ``_custom_ops.rotary_embedding`` and the reference give differently."""
    generator = torch.Generator().manual_seed(0)
    q, k, table = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 128), (9, 64), (9, 64)))
    positions = torch.arange(9)
    cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(table, positions))
    want = [rotate(x.view(9, -1, 64), cos, sin, is_neox).bfloat16().view(x.shape) for x in (q, k)]
    _custom_ops.rotary_embedding(positions, q, k, 64, table, is_neox)
    return sum(int((got != wanted).sum()) for got, wanted in zip((q, k), want, strict=True))


found = {"vllms_kernel": {pairs: differences(pairs == "NeoX") for pairs in ("NeoX", "GPT-J")}}
gpu_ops.register()
found["sandbox"] = {pairs: differences(pairs == "NeoX") for pairs in ("NeoX", "GPT-J")}
found["capability"] = torch.backends.cpu.get_cpu_capability()
maps = Path("/proc/self/maps").read_text().splitlines()
found["libraries"] = sorted({Path(line.split()[-1]).name for line in maps if "/vllm/_C" in line})
print("\n" + json.dumps(found))
