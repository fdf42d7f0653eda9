"""A load format of vLLM's for checkpoints that are a ``config.json`` alone: weights are drawn.

They are wide enough that tokens differ. vLLM's own "dummy" format draws values of at most 1e-3: every comparison of
tokens would pass.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

LOAD_FORMAT = "aiter_mla_random"


def save(config: dict[str, Any], folder: Path) -> Path:
    """Write ``config.json`` into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


@cache
def register() -> None:
    """Let vLLM know the format, and the model types whose config classes come with their checkpoints' own code."""
    from transformers import AutoConfig, PretrainedConfig
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    @register_model_loader(LOAD_FORMAT)
    class RandomWeights(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, tensor in model.state_dict().items():
                fill(name, tensor)

    for name in ("pangu_ultra_moe", "sarvam_mla", "bailing_hybrid"):
        AutoConfig.register(name, type(name, (PretrainedConfig,), {"model_type": name}), exist_ok=True)


def fill(name: str, tensor: torch.Tensor) -> None:
    """Draw one weight, the same in every process: a norm around 1, a matrix that keeps its input's size.

    The output of ``lm_head`` is three times as wide, so that greedy tokens vary; queries and latents twice.
    """
    if not tensor.is_floating_point():
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    if tensor.dim() < 2:
        drawn = 0.1 * drawn + (0.0 if "bias" in name else 1.0)
    elif "embed" not in name:
        gain = 3.0 if "lm_head" in name else 2.0 if "self_attn" in name else 1.0
        drawn *= gain / tensor.shape[-1] ** 0.5
    tensor.copy_(drawn)
