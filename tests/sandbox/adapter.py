"""A LoRA adapter of random weights for the sandbox's model, on the projections around attention and in the MLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

RANK = 8
# Two places: vLLM on a CPU takes the last one for a request without an adapter, so it must stay empty.
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
# What a layer has beside attention; of attention what vLLM lets an adapter change.
TARGETS = ("q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj")


def save(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write an adapter for the model of these ``weights``, wide enough that tokens change, and return its folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in TARGETS:
            continue
        rows, columns = weight.shape
        for half, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            tensors[f"base_model.model.{module}.{half}.weight"] = drawn.to(weight.dtype)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def request(folder: Path) -> Any:
    """What vLLM takes with a request that goes through the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("random", 1, str(folder))
