"""What vLLM itself decides for ``vllm serve`` on an AMD card: its finished ``VllmConfig``, and its MLA layers.

The plugin is loaded, so the engine's own gate decides. For the process of ``plan`` and for tests only: what is made up
stays in the process.

On a ROCm machine the platform is real. Elsewhere vLLM's own ``RocmPlatform`` runs, and this is made up for it:

1. packages of a ROCm image, ``_PACKAGES``: vLLM asks whether they are there, and imports names of them;
2. ``amdsmi``, the driver's library: eight linked cards, their architecture and their memory;
3. ``torch.version.hip`` and what torch says of a card, its streams and its events;
4. vLLM's compiled modules, and the schemas of the few ops that are looked up by name at import. An answer to every op
   would switch NVIDIA's paths on;
5. Triton is there: without it vLLM takes its older model runner.

On every machine the model has no weights. Its layers are built on torch's ``meta`` device, with this made up:

6. no tokenizer is loaded, because a config may come alone; a model that asks it for a token's number gets a stub;
7. vLLM looks at a model class in this process: the one it starts for that would not have this platform;
8. one process group, which reports the size of the tensor-parallel group and holds all experts;
9. the compilation mode is NONE while layers are built: passes would import compiled kernels;
10. only ``kv_b_proj`` and attention are quantised: other layers look for kernels of the card;
11. what would move or read a weight does nothing: ``Module.to``, the truth of a tensor, the device and its cache.

A package that vLLM asks for and that is missing in 1 may change the answer without an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from vllm_aiter_mla.admission import LayerView, Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import offline

CARDS = {"gfx942": ("0x74a1", 192), "gfx950": ("0x75a0", 288)}
"""The driver's device id and the memory in GiB of the smallest card of each architecture."""
MOST_LAYERS, MOST_POSITIONS = 2**9, 2**24
_PACKAGES = ("aiter", "quark", "flash_attn", "timm", "amdsmi")
_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._rocm_C", "vllm._moe_C")
_libraries: list[Any] = []


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules in which every name is a callable; vLLM imports such names and calls few of them."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = any(name == one or name.startswith(f"{one}.") for one in self._names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = self._attribute

    @staticmethod
    def _attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # vLLM looks for this argument in the signatures of flash_attn and aiter.
        causal = inspect.Parameter("causal", inspect.Parameter.KEYWORD_ONLY)
        return mock.MagicMock(__signature__=inspect.Signature([causal]))


def pretend_rocm(arch: str) -> None:
    """Make vLLM's own ROCm platform the current one, with eight cards of ``arch``, before vLLM is imported."""
    import torch

    device, gib = CARDS[arch]
    pretend_modules(*_PACKAGES, *_EXTENSIONS)
    import amdsmi

    asic = {"target_graphics_version": arch, "device_id": device, "market_name": "AMD Instinct"}
    vars(amdsmi).update(
        AmdSmiException=type("AmdSmiException", (Exception,), {}),
        amdsmi_get_processor_handles=lambda: list(range(8)),
        amdsmi_get_gpu_asic_info=lambda handle: asic,
        amdsmi_get_gpu_memory_total=lambda handle, kind: gib << 30,
        amdsmi_topo_get_link_type=lambda one, other: {"hops": 1, "type": 2},  # XGMI
    )
    torch.version.hip = "7.0.1"
    pretend_cards((9, 4), gib, gcnArchName=f"{arch}:sramecc+:xnack-", warp_size=64)
    torch.cuda.Stream = torch.cuda.Event = type(  # type: ignore[assignment, misc]
        "Unused", (), {"__init__": lambda self, *given, **named: None}
    )
    import vllm.platforms
    from vllm.platforms import rocm

    rocm._rocm_device_count_stateless = lambda devices=None: 8  # type: ignore[assignment]
    vllm.platforms._current_platform = rocm.RocmPlatform()  # type: ignore[assignment]
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True


def pretend_cards(capability: tuple[int, int], gib: int, **properties: Any) -> None:
    """Let torch answer for eight cards without a driver."""
    import torch

    major, minor = capability
    sizes = {"total_memory": gib << 30, "multi_processor_count": 304, "major": major, "minor": minor}
    card = SimpleNamespace(name="a card", **sizes, **properties)
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: "a card"
    torch.cuda.device_count = lambda: 8


def pretend_modules(*names: str) -> None:
    """Put stubs in the places of modules, and define the ops of vLLM that fusions name when imported."""
    import torch

    sys.meta_path.insert(0, _Stubs(*names))
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    rotary = "Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox"
    library.define(f"rotary_embedding({rotary}, int rope_dim_offset=0, bool inverse=False) -> ()")
    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
    for kind in ("static_scaled", "dynamic_scaled", "dynamic_per_token_scaled"):
        library.define(f"{kind}_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")


def inspect_in_process() -> None:
    """Let vLLM look at model classes in this process."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(  # type: ignore
        model.load_model_cls()
    )


class NoAnswerError(ValueError):
    """vLLM says too little for a plan: it does not take the options or the model, or it cannot be asked."""


class LayerKind(NamedTuple):
    """What vLLM built of one MLA layer. What only weights or a card's build can tell is taken as it should be."""

    view: LayerView
    format: str  # of its absorb weight, by the name of ``kernels.absorb``
    method: str  # class that quantises ``kv_b_proj``
    weight: str  # dtype of that weight; empty if it is packed
    has_rope: bool  # the layer, or the module around it, has a rotary embedding
    draft: bool  # it belongs to the draft model


@dataclass
class Answer:
    """What vLLM decides for one model and one set of options, as far as it gets."""

    given: offline.Given | None = None
    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] | None = None  # see ``engine_facts``; None if vLLM refuses to start
    layers: list[tuple[LayerKind, int]] = field(default_factory=list)  # counted, the most frequent first
    skip: Skip | None = None  # where vLLM stops: what it does not take, or the error that its layers raise


def start(asked: str) -> dict[str, Any]:
    """Load vLLM with the plugin, on this machine's card, or on one made up: ``asked``, by default gfx942.

    Return ``arch``, ``made_up`` (there is no ROCm here), ``vllm`` (its version) and ``on`` (its switches by name).

    Raises:
        ValueError: this machine has another card, or vLLM cannot read one of its variables.
    """
    import torch

    if made_up := torch.version.hip is None:
        card = asked or "gfx942"
        pretend_rocm(card)
    else:
        from vllm.platforms import rocm

        card = str(rocm._GCN_ARCH).partition(":")[0]  # read by amdsmi, which leaves the card alone
        if asked not in ("", card):
            raise ValueError(f"--arch {asked}: this machine has a {card}; a plan makes nothing up where a card is")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    inspect_in_process()
    on = {name: bool(offline.switched_on(name, dict(os.environ))) for name in offline.VARIABLES}
    return {"arch": card, "made_up": made_up, "vllm": compat_config.vllm_version(), "on": on}


def answer(folder: Path, arguments: Sequence[str]) -> Answer:
    """Return what vLLM decides.

    Args:
        folder: holds ``config.json``.
        arguments: of ``vllm serve``. The plugin is switched on where they do not.

    Raises:
        NoAnswerError: vLLM stops before it has read the model, at an option, or at an error of its own.
    """
    found = Answer()
    try:
        args, found.given = offline.engine_args(folder, arguments)
        config = _config(args, found)
        found.engine = engine_facts(config)
        if found.model["is_mla"]:
            found.layers = _layers(config)
            found.engine["options"]["block_size"] = config.cache_config.block_size
    except (Exception, SystemExit) as error:
        found.skip = _why(error, found)
    return found


def _why(error: BaseException, found: Answer) -> Skip:
    """Return what was raised: vLLM's own check, or an error with the line that raised it.

    Raises:
        NoAnswerError: no plan can be made of what was found before.
    """
    findings = getattr(error, "errors", None)
    named = []
    if callable(findings):  # pydantic's
        for one in findings():
            option = ".".join(map(str, one["loc"])).replace("_", "-")
            named.append(f"--{option} {one['input']}: {one['msg']}" if option else one["msg"])
    said = " ".join("; ".join(named).replace("Value error, ", "").split()) or " ".join(str(error).split())
    if (found.engine is None and any(one.startswith("--") for one in named)) or found.given is None:
        raise NoAnswerError(said) from error
    if found.engine is None and isinstance(error, (ValueError, NotImplementedError)):
        if not found.model:
            raise NoAnswerError(f"vLLM does not take this model with these options: {said}") from error
        return Skip("vllm_refuses", said or type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if f"{os.sep}vllm{os.sep}" in frame.filename), frames[-1])
    said = f"{type(error).__name__}: {said} ({Path(at.filename).name}:{at.lineno} in {at.name})"
    if found.engine is None:
        raise NoAnswerError(f"not known, vLLM could not be asked about this model here: {said}") from error
    return Skip("not_known", said)


def _config(args: Any, found: Answer) -> Any:
    """Build vLLM's finished config; ``found`` gets the model's facts as soon as vLLM has read the model."""
    from vllm.usage.usage_lib import UsageContext

    read = args.create_model_config

    def read_and_tell() -> Any:
        model = read()
        sizes = model.get_total_num_hidden_layers(), model.max_model_len
        if sizes[0] > MOST_LAYERS or sizes[1] > MOST_POSITIONS:
            raise ValueError(f"{sizes[0]} layers and {sizes[1]} positions are more than is built here")
        found.model = _model(model)
        return model

    args.create_model_config = read_and_tell
    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _model(model: Any) -> dict[str, Any]:
    text = model.hf_text_config
    return {
        "architecture": str(model.architecture),
        "model_type": str(getattr(text, "model_type", "")),
        "is_mla": bool(model.use_mla),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hidden_size": model.get_hidden_size(),
        "heads": model.model_arch_config.total_num_attention_heads,
        "layers": model.get_total_num_hidden_layers(),
        "max_position": getattr(text, "max_position_embeddings", None) or model.max_model_len,
        "listed_layers": len(compat_config.mla_layers(model)),
    }


def engine_facts(config: Any) -> dict[str, Any]:
    """Return what the options became.

    Returns:
        ``gate``: limit and integration of the plugin's pass in vLLM's slot, None without one. ``view``: what admission
        reads. ``user_pass``: why the user's pass cannot be chained, or None. ``options``, ``ranges`` and ``captures``.
    """
    compilation, scheduler, parallel = config.compilation_config, config.scheduler_config, config.parallel_config
    engaged = compat_config.current_pass(compilation)
    limit = getattr(engaged, "limit", None)
    view = compat_config.view_of(config, compat_config.settings_of(config))
    return {
        "gate": None if limit is None else {"limit": limit, "integration": engaged.integration},
        "view": view,
        "user_pass": compat_config.why_not_chainable(compilation) if limit is None else None,
        "options": {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "num_drafts": config.num_speculative_tokens,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            **{name: getattr(view, name) for name in ("dcp", "pcp", "enforce_eager", "mode")},
        },
        "ranges": [(one.start, one.end) for one in compilation.get_compile_ranges()] if compilation.mode else [],
        "captures": compat_config.capture_sizes(compilation),
    }


def _layers(config: Any) -> list[tuple[LayerKind, int]]:
    """Build the model of one rank without weights, its draft too; return its MLA layers, equal ones counted."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    spec = config.speculative_config
    draft = spec.draft_model_config if spec is not None else None
    drafts = [draft] if draft is not None and draft is not config.model_config and draft.use_mla else []
    with _without_weights(config):
        models = [initialize_model(config, model_config=model) for model in (config.model_config, *drafts)]
        current_platform.update_block_size_for_backend(config)
    found: Counter[LayerKind] = Counter()
    for number, model in enumerate(models):
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        layers = (module for module in model.modules() if isinstance(module, MLAAttention))
        found.update(_kind(layer, parents[layer], draft=number > 0) for layer in layers)
    return found.most_common()


def _kind(layer: Any, parent: Any, draft: bool) -> LayerKind:
    from vllm_aiter_mla.compat.layer import layer_view

    view = layer_view(layer)
    if not view.missing:
        dtype = str(layer._vllm_config.model_config.dtype).removeprefix("torch.")
        view = replace(view, has_absorbed_weight=True, has_rope_kernel=True, model_dtype=dtype)
    weight = getattr(layer.kv_b_proj, "weight", None)
    fp4, fp8 = layer.is_aiter_triton_fp4_bmm_enabled, layer.is_aiter_triton_fp8_bmm_enabled
    return LayerKind(
        view,
        "mxfp4" if fp4 else "fp8" if fp8 else "plain",
        type(layer.kv_b_proj.quant_method).__name__,
        "" if weight is None else str(weight.dtype).removeprefix("torch."),
        any(getattr(module, "rotary_emb", None) is not None for module in (layer, parent)),
        draft,
    )


@contextmanager
def _without_weights(config: Any) -> Iterator[None]:
    """Build models on the meta device for a block: numbers 6 and 8 to 11 of the list above."""
    import torch
    from vllm.config import CompilationMode, ParallelConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as groups
    from vllm.platforms import current_platform
    from vllm.tokenizers import registry as tokenizers
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    platform = type(current_platform)
    with ExitStack() as stack:
        replaced: Callable[..., Any] = lambda *what, **how: stack.enter_context(mock.patch.object(*what, **how))  # noqa: E731
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        replaced(platform, "device_type", "meta")
        stack.enter_context(set_current_vllm_config(config))
        with mock.patch.object(config, "parallel_config", ParallelConfig()):
            groups.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            groups.initialize_model_parallel()
        groups.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
        init_workspace_manager(torch.device("meta"))
        replaced(config.compilation_config, "mode", CompilationMode.NONE)
        replaced(config.parallel_config, "enable_expert_parallel", False)
        if config.quant_config is not None:
            replaced(config.quant_config, "get_quant_method", _method_of_kv_b_proj(config.quant_config))
        replaced(config.model_config, "skip_tokenizer_init", False)
        replaced(tokenizers, "cached_get_tokenizer", lambda *given, **named: mock.MagicMock())
        replaced(torch.nn.Module, "to", lambda module, *to, **where: module)
        replaced(torch.Tensor, "__bool__", lambda tensor: True)
        replaced(torch.accelerator, "empty_cache", lambda: None)
        replaced(platform, "current_device", lambda *_: 0, create=True)
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        yield


def _method_of_kv_b_proj(quant: Any) -> Callable[[Any, str], Any]:
    """Return the ``get_quant_method`` of number 10."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    ask = quant.get_quant_method

    def method(layer: Any, prefix: str) -> Any:
        if "kv_b_proj" in prefix or isinstance(layer, MLAAttention):
            return ask(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    return method
