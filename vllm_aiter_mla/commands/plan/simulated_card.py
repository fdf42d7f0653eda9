# SPDX-License-Identifier: Apache-2.0
"""Simulate an AMD card for vLLM's own ``RocmPlatform``, in this process.

Nothing is simulated if torch is built for ROCm and ``amdsmi`` finds a card, because vLLM finds AMD cards through
``amdsmi``. On other machines, a ROCm image without a card among them, these are simulated:

1. packages of a ROCm image, ``_PACKAGES``: vLLM checks for them and imports names from them;
2. ``amdsmi``, the driver's library, with eight linked cards, their architecture and their memory;
3. ``torch.version.hip``, and torch's properties of a card, its streams and its events;
4. vLLM's compiled modules, which would switch on NVIDIA's paths, and the few ops that imports look up by name;
5. Triton, without which vLLM uses its older model runner, and the allocator that sleep mode needs.

If vLLM checks for a package that is missing from 1, the facts may change without an error.
"""

import importlib.abc
import importlib.machinery
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from vllm_aiter_mla.commands.compat import rocm_config

# Device id and memory in GiB of each architecture's smallest card.
CARDS = {"gfx942": ("0x74a1", 192), "gfx950": ("0x75a0", 288)}
_PACKAGES = ("aiter", "quark", "flash_attn", "timm", "amdsmi")
_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._rocm_C", "vllm._moe_C")
_op_libraries: list[Any] = []  # torch drops the ops of a library when the library is freed


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules in which every name is a callable. vLLM imports names from them, and calls few."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_stub = any(name == stub or name.startswith(f"{stub}.") for stub in self._names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stub else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = self._attribute

    @staticmethod
    def _attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # vLLM looks for this argument in the signatures of flash_attn and aiter.
        causal = inspect.Parameter("causal", inspect.Parameter.KEYWORD_ONLY)
        return mock.MagicMock(__signature__=inspect.Signature([causal]))


def simulate_rocm(arch: str) -> None:
    """Make vLLM's own ROCm platform the current one, with eight cards of ``arch``, before vLLM imports its modules."""
    import torch

    device_id, memory_gib = CARDS[arch]
    rocm_config.import_vllm()
    simulate_modules(*_PACKAGES, *_EXTENSIONS)
    import amdsmi

    asic = {"target_graphics_version": arch, "device_id": device_id, "market_name": "AMD Instinct"}
    vars(amdsmi).update(
        AmdSmiException=type("AmdSmiException", (Exception,), {}),
        amdsmi_get_processor_handles=lambda: list(range(8)),
        amdsmi_get_gpu_asic_info=lambda handle: asic,
        amdsmi_get_gpu_memory_total=lambda handle, kind: memory_gib << 30,
        amdsmi_topo_get_link_type=lambda first, second: {"hops": 1, "type": 2},  # XGMI
    )
    torch.version.hip = "7.0.1"
    simulate_cards((9, 4), memory_gib, gcnArchName=f"{arch}:sramecc+:xnack-", warp_size=64)
    torch.cuda.Stream = torch.cuda.Event = type(  # type: ignore[assignment, misc]
        "Unused", (), {"__init__": lambda self, *args, **kwargs: None}
    )
    rocm_config.use_rocm_platform(device_count=8)


def simulate_cards(capability: tuple[int, int], memory_gib: int, **properties: Any) -> None:
    """Let torch report eight cards without a driver, each with ``memory_gib`` GiB and these properties."""
    import torch

    major, minor = capability
    sizes = {"total_memory": memory_gib << 30, "multi_processor_count": 304, "major": major, "minor": minor}
    card = SimpleNamespace(name="a card", **sizes, **properties)
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: "a card"
    torch.cuda.device_count = lambda: 8


def simulate_modules(*names: str) -> None:
    """Replace modules by stubs, and define the ops of vLLM that its fusions look up at import."""
    import torch

    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]  # ``amdsmi`` was imported to look for a card
    sys.meta_path.insert(0, _Stubs(*names))
    library = torch.library.Library("_C", "FRAGMENT")
    _op_libraries.append(library)
    library.define(
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
    )
    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
    norm_arguments = "Tensor! result, Tensor input, Tensor weight"
    library.define(f"rms_norm({norm_arguments}, float epsilon) -> ()")
    library.define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()")
    library.define(f"rms_norm_static_fp8_quant({norm_arguments}, Tensor scale, float epsilon) -> ()")
    library.define(
        "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, "
        "Tensor scale, float epsilon) -> ()"
    )
    library.define(
        f"rms_norm_dynamic_per_token_quant({norm_arguments}, Tensor! scale, float epsilon, Tensor? scale_ub, "
        "Tensor!? residual) -> ()"
    )
    for name in ("static_scaled", "dynamic_scaled", "dynamic_per_token_scaled"):
        library.define(f"{name}_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")
