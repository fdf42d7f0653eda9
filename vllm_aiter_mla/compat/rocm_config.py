"""What vLLM itself decides for ``vllm serve`` on an AMD card: its finished ``VllmConfig``, and its MLA layers.

``python -m vllm_aiter_mla.compat.rocm_config [gfx942|gfx950]`` reads one JSON request a line and writes one answer a
line: see :func:`answer`. The plugin is loaded, so the engine's own gate decides. For ``plan`` and for tests only.

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

import gc
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE

CARDS = {"gfx942": ("0x74a1", 192), "gfx950": ("0x75a0", 288)}
"""The driver's device id and the memory in GiB of the smallest card of each architecture."""
XGMI = 2  # amdsmi's number of the link between cards
MOST_LAYERS, MOST_POSITIONS = 2**9, 2**24
_PACKAGES = ("aiter", "quark", "flash_attn", "timm")
_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._rocm_C", "vllm._moe_C")
_AS_IT_STANDS = "aiter_mla_as_it_stands"
_libraries: list[Any] = []


def stub(name: str) -> ModuleType:
    """Return a module in which every name is a callable; vLLM imports such names and calls few of them."""
    module = ModuleType(name)

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        found = mock.MagicMock()
        # vLLM looks for this argument in the signatures of flash_attn and aiter.
        found.__signature__ = inspect.Signature([inspect.Parameter("causal", inspect.Parameter.KEYWORD_ONLY)])
        return found

    vars(module).update(__getattr__=attribute, __path__=[])
    return module


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for the packages of a ROCm image, None for any other."""
        known = name.partition(".")[0] in _PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> ModuleType:
        """Return the stub."""
        return stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the stub is complete."""


def pretend_rocm(arch: str) -> None:
    """Make vLLM's own ROCm platform the current one, with eight cards of ``arch``, before vLLM is imported."""
    import torch

    device, gib = CARDS[arch]
    sys.meta_path.insert(0, _Packages())
    smi: Any = stub("amdsmi")
    smi.AmdSmiException = type("AmdSmiException", (Exception,), {})
    smi.amdsmi_get_processor_handles = lambda: list(range(8))
    smi.amdsmi_get_gpu_asic_info = lambda handle: {
        "target_graphics_version": arch, "device_id": device, "market_name": "AMD Instinct"}  # fmt: skip
    smi.amdsmi_get_gpu_memory_total = lambda handle, kind: gib << 30
    smi.amdsmi_topo_get_link_type = lambda one, other: {"hops": 1, "type": XGMI}
    sys.modules["amdsmi"] = smi
    torch.version.hip = "7.0.1"
    pretend_cards((9, 4), gib, gcnArchName=f"{arch}:sramecc+:xnack-", warp_size=64)
    torch.cuda.Stream = torch.cuda.Event = type(  # type: ignore[assignment, misc]
        "Unused", (), {"__init__": lambda self, *given, **named: None}
    )
    pretend_extensions(*_EXTENSIONS)
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
    card = SimpleNamespace(
        name="a card", total_memory=gib << 30, multi_processor_count=304, major=major, minor=minor, **properties
    )
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: card.name
    torch.cuda.device_count = lambda: 8


def pretend_extensions(*names: str) -> None:
    """Put stubs in the places of vLLM's compiled modules, and define the ops that fusions name when imported."""
    import torch

    sys.modules.update({name: stub(name) for name in names})
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


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM decides for one model and one set of options.

    Args:
        request: ``folder`` (holds ``config.json``), ``arguments`` (of ``vllm serve``), ``enable`` (switch the plugin on
            where the arguments do not).

    Returns:
        JSON: ``given``, ``model``, ``engine`` and ``layers`` as far as vLLM gets, and ``failed`` where it stops:
        ``stage``, ``wrong`` (vLLM does not take the model or the options), ``option`` (it names one), ``said``.
    """
    found: dict[str, Any] = {}
    stage = "options"
    try:
        args, found["given"] = _engine_args(request)
        stage = "model"
        config = _config(args, found)
        stage = "engine"
        found["engine"] = engine_facts(config)
        if found["model"]["is_mla"]:
            stage = "layers"
            found["layers"] = _layers(config)
            found["engine"]["block_size"] = config.cache_config.block_size
    # A stage that raises is an answer: the reader is told which, and what vLLM said.
    except (Exception, SystemExit) as error:
        if stage == "model" and "model" in found:
            stage = "engine"
        found["failed"] = {"stage": stage} | _why(error, stage)
    return found


def _why(error: BaseException, stage: str) -> dict[str, Any]:
    """Say what was raised, and whether it is vLLM's own check; any other error names the line that raised it."""
    findings, option = getattr(error, "errors", None), False
    if callable(findings):
        told = []
        for one in findings():
            place = ".".join(map(str, one["loc"])).replace("_", "-")
            option |= bool(place)
            told.append(
                f"--{place} {one['input']}: {one['msg']}" if place else one["msg"].removeprefix("Value error, ")
            )
        return {"wrong": True, "option": option, "said": " ".join("; ".join(told).split())}
    said = " ".join(str(error).split())
    if stage != "layers" and isinstance(error, (ValueError, NotImplementedError)):
        return {"wrong": True, "option": False, "said": said or type(error).__name__}
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if f"{os.sep}vllm{os.sep}" in frame.filename), frames[-1])
    place = f"{Path(at.filename).name}:{at.lineno} in {at.name}"
    return {"wrong": False, "option": False, "said": f"{type(error).__name__}: {said} ({place})"}


def _engine_args(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Parse the arguments as ``vllm serve`` does; return vLLM's ``AsyncEngineArgs`` and what was given."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_aiter_mla.compat import config, offline

    folder = Path(request["folder"])
    parsed = offline.serve_options([str(folder), *request["arguments"]])
    settings = config.settings_of(parsed)
    names = ("max_num_seqs", "max_num_batched_tokens", "block_size")
    given = {"settings": asdict(settings)} | {name: getattr(parsed, name) for name in names}
    given["attention_backend"] = offline.backend_name(parsed)
    if request["enable"]:
        setattr(parsed.compilation_config.pass_config, FLAG_FIELD, True)
        # Strict mode would end the plan at the first reason.
        own = dict((parsed.additional_config or {}).get(NAMESPACE, {})) | {"enabled": True, "strict": False}
        parsed.additional_config = {**(parsed.additional_config or {}), NAMESPACE: own}
    parsed.model, parsed.skip_tokenizer_init, parsed.tokenizer = str(folder), True, None
    args = AsyncEngineArgs.from_cli_args(parsed)
    given["notes"] = _without_its_own_code(args, folder)
    return args, given


def _without_its_own_code(args: Any, folder: Path) -> list[str]:
    """Read a config whose class is Python code of a checkpoint that is not here by its fields, and say so."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from vllm.transformers_utils import config as configs
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    place = str((fields.get("auto_map") or {}).get("AutoConfig", "")).partition(".")[0]
    if args.trust_remote_code and place and (folder / f"{place}.py").is_file():
        return []
    kind, args.trust_remote_code = fields.get("model_type"), False
    if kind in configs._CONFIG_REGISTRY or kind in CONFIG_MAPPING or args.config_format != "auto":
        return []

    class AsItStands(ConfigParserBase):
        def parse(self, model: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], Any]:
            return dict(fields), PreTrainedConfig.from_dict(dict(fields))

    configs.register_config_parser(_AS_IT_STANDS)(AsItStands)
    args.config_format = _AS_IT_STANDS
    return [f"neither vLLM nor transformers has a config class for {kind!r}: its fields were read as they stand"]


def _config(args: Any, found: dict[str, Any]) -> Any:
    """Build vLLM's finished config; ``found`` gets the model's facts as soon as vLLM has read the model."""
    from vllm.usage.usage_lib import UsageContext

    read = args.create_model_config

    def read_and_tell() -> Any:
        model = read()
        sizes = model.get_total_num_hidden_layers(), model.max_model_len
        if sizes[0] > MOST_LAYERS or sizes[1] > MOST_POSITIONS:
            raise ValueError(f"{sizes[0]} layers and {sizes[1]} positions are more than is built here")
        found["model"] = _model(model)
        return model

    args.create_model_config = read_and_tell
    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _model(model: Any) -> dict[str, Any]:
    from vllm_aiter_mla.compat import config

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
        "listed_layers": len(config.mla_layers(model)),
    }


def engine_facts(config: Any) -> dict[str, Any]:
    """Return what the options became; ``gate`` is what the plugin's pass in vLLM's slot says, None without one."""
    from vllm_aiter_mla.compat import config as compat_config

    compilation, scheduler, parallel = config.compilation_config, config.scheduler_config, config.parallel_config
    engaged = compat_config.current_pass(compilation)
    limit = getattr(engaged, "limit", None)
    settings = compat_config.settings_of(config)
    chained = compat_config.why_not_chainable(compilation) if limit is None else None
    mode = compilation.cudagraph_mode
    return {
        "gate": None if limit is None else {"limit": limit, "integration": engaged.integration},
        "view": asdict(compat_config.view_of(config, settings)),
        "user_pass": None if chained is None else chained.message,
        "cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "num_drafts": config.num_speculative_tokens,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "ranges": [[one.start, one.end] for one in compilation.get_compile_ranges()] if compilation.mode else [],
        "captures": compat_config.capture_sizes(compilation),
        "cudagraph_mode": mode.name if mode is not None else "NONE",
        "graph_partition": compilation.use_inductor_graph_partition,
        "splitting_ops": list(compilation.splitting_ops or ()),
    }


def _layers(config: Any) -> list[dict[str, Any]]:
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
    found: dict[str, dict[str, Any]] = {}
    for number, model in enumerate(models):
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        for layer in model.modules():
            if isinstance(layer, MLAAttention):
                one = _layer(layer, parents[layer]) | {"draft": number > 0}
                found.setdefault(json.dumps(one), one | {"count": 0})["count"] += 1
    return sorted(found.values(), key=lambda one: -one["count"])


def _layer(layer: Any, parent: Any) -> dict[str, Any]:
    """Return the facts of one layer. What only weights or a card's build can tell is taken as it should be."""
    from vllm_aiter_mla.compat.layer import layer_view

    view = layer_view(layer)
    if not view.missing:
        dtype = str(layer._vllm_config.model_config.dtype).removeprefix("torch.")
        view = replace(view, has_absorbed_weight=True, has_rope_kernel=True, model_dtype=dtype)
    weight = getattr(layer.kv_b_proj, "weight", None)
    fp4, fp8 = layer.is_aiter_triton_fp4_bmm_enabled, layer.is_aiter_triton_fp8_bmm_enabled
    return {
        "view": asdict(view) | {"known_impls": sorted(view.known_impls)},
        "form": "mxfp4" if fp4 else "fp8" if fp8 else "plain",
        "method": type(layer.kv_b_proj.quant_method).__name__,
        "weight": "" if weight is None else str(weight.dtype).removeprefix("torch."),
        "has_rope": any(getattr(module, "rotary_emb", None) is not None for module in (layer, parent)),
    }


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


def _this_card() -> str:
    """Return the architecture of this machine's card as vLLM reads it: by amdsmi, which leaves the card alone."""
    from vllm.platforms import rocm

    return str(rocm._GCN_ARCH).partition(":")[0]


def main(asked: str = "") -> None:
    """Answer requests until stdin ends, each in a process of its own: vLLM keeps much of a config in its modules."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to stdout

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=out, flush=True)

    try:
        import torch

        rocm = torch.version.hip is not None
        card = _this_card() if rocm else asked or "gfx942"
        if asked not in ("", card):
            return tell(
                {"failed": f"--arch {asked}: this machine has a {card}; a plan makes nothing up where a card is"}
            )
        if not rocm:
            pretend_rocm(card)
        from vllm.plugins import load_general_plugins

        from vllm_aiter_mla.compat import config, offline, switches

        load_general_plugins()
        inspect_in_process()
        offline.serve_options([])  # imports what every request needs, once
        on = {name: bool(switches.switched_on(name, dict(os.environ))) for name in switches.VARIABLES}
    except Exception as error:
        return tell({"failed": f"{type(error).__name__}: {error}"})
    tell({"arch": card, "made_up": not rocm, "vllm": config.vllm_version(), "on": on})
    gc.freeze()  # a fork then neither copies nor looks through what is imported
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            tell(answer(json.loads(line)))
            os._exit(0)
        if status := os.waitpid(process, 0)[1]:
            tell({"failed": {"stage": "process", "wrong": False, "option": False, "said": f"vLLM ended with {status}"}})


if __name__ == "__main__":
    main(*sys.argv[1:])
