"""What ``plan`` asks vLLM about a model: its ``ModelConfig`` with the user's options, its checks, its layers.

What: vLLM's own objects, made from a config alone. Two things are answered for the card that is planned for instead of
for this machine: which quantisation it takes, and which of a model's implementations, one for each vendor, is loaded.
Why: a copy of vLLM's rules was wrong for every second published checkpoint.
Link: ``EngineArgs.create_model_config``, ``RocmPlatform.verify_quantization``, ``registry._LazyRegisteredModel`` (0.30
to 0.33).
Probe: an error of vLLM's own checks is a skip, with its sentence; any other error is "not known".
Remove when: vLLM has a dry run.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm_aiter_mla.compat.dry_model import MlaLayer, mla_layers

# Models far past these would fill this machine's memory or its day; no checkpoint comes near.
MOST_LAYERS, MOST_POSITIONS = 2**9, 2**24
AS_IT_STANDS = "aiter_mla_as_it_stands"


class NotKnownError(RuntimeError):
    """vLLM could not be asked about this model here."""


class RefusedError(ValueError):
    """vLLM itself does not take the model with these options."""


@dataclass
class Answers:
    """What vLLM says.

    Attributes:
        architecture, model_type: of the model class and of the text model.
        is_mla: whether vLLM runs it with MLA.
        dtype: of the activations, without ``torch.``.
        cache_dtype: of the KV cache, after the checkpoint's own wish.
        hidden_size, heads, layers, max_position: of the text model; ``heads`` are query heads over all ranks.
        num_drafts: speculative tokens per request.
        mla_layers, draft_layers: in the model and in its draft.
        skips: sentences of vLLM's own checks that would stop the server.
        unknown: what could not be asked, and why.
        notes: what was read otherwise than a server would read it.
    """

    architecture: str
    model_type: str
    is_mla: bool
    dtype: str
    cache_dtype: str
    hidden_size: int
    heads: int
    layers: int
    max_position: int
    num_drafts: int = 0
    mla_layers: tuple[MlaLayer, ...] = ()
    draft_layers: tuple[MlaLayer, ...] = ()
    skips: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def ask(parsed: Any, folder: Path, arch: str, batch: tuple[int, int]) -> Answers:
    """Ask vLLM about the config in ``folder`` with the options ``parsed``.

    Args:
        parsed: vLLM's namespace of options; left as it is.
        folder: holds ``config.json``, and what vLLM reads beside it. Nothing is downloaded.
        arch: the card that is planned for.
        batch: ``max_num_seqs`` and ``max_num_batched_tokens``.

    Raises:
        RefusedError: vLLM does not take the model with these options, so it has no facts to tell.
        NotKnownError: the model cannot be read here.
    """
    with _as_on(arch):
        args, notes = _engine_args(parsed, folder, batch)
        model = _model_config(args)
        answers = _facts(model, args, notes)
        for what, check in _checks(args, model, arch).items():
            _note(answers, what, check)
        drafts = _Drafts(args, model)
        _note(answers, "speculative decoding", drafts.read)
        answers.num_drafts = drafts.count
        if answers.is_mla:
            _note(answers, "the model's layers", lambda: _build(answers, model, drafts.config))
    return answers


def _note(answers: Answers, what: str, step: Callable[[], Any]) -> None:
    """Run one question; vLLM's own skip and whatever else is raised are kept apart."""
    try:
        step()
    except NotKnownError as error:
        answers.unknown.append(f"{what}: {error}")
    except (ValueError, NotImplementedError) as error:
        answers.skips.append(_said(error))
    except Exception as error:
        answers.unknown.append(f"{what}: {type(error).__name__}: {_said(error)}")


def _build(answers: Answers, model: Any, speculative: Any) -> None:
    from vllm.config import CacheConfig, CompilationConfig, CompilationMode, DeviceConfig, LoadConfig, VllmConfig

    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(enable_prefix_caching=False),
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=CompilationMode.NONE),
        speculative_config=speculative,
    )
    draft = getattr(speculative, "draft_model_config", None)
    try:
        answers.mla_layers = mla_layers(config)
        if draft is not None and draft is not model and draft.use_mla:
            answers.draft_layers = mla_layers(config, draft)
    except Exception as error:
        # Not a check of vLLM's: the model class met this machine, or a field that it does not know.
        raise NotKnownError(f"{type(error).__name__}: {_said(error)}") from error


class _Drafts:
    """Speculative decoding as vLLM reads it: ``config`` (or None) and ``count``, the tokens per request."""

    def __init__(self, args: Any, model: Any) -> None:
        self._args, self._model = args, model
        self.config: Any = None
        given = (args.speculative_config or {}).get("num_speculative_tokens", getattr(args, "spec_tokens", None))
        self.count = given if isinstance(given, int) and given > 0 else 0

    def read(self) -> None:
        from vllm.config import ParallelConfig

        self.config = self._args.create_speculative_config(self._model, ParallelConfig())
        if self.config is not None:
            self.count = int(self.config.num_speculative_tokens)


def _engine_args(parsed: Any, folder: Path, batch: tuple[int, int]) -> tuple[Any, list[str]]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = copy.deepcopy(parsed)
    given.model, given.skip_tokenizer_init, given.tokenizer = str(folder), True, None
    given.max_num_seqs, given.max_num_batched_tokens = batch
    args = AsyncEngineArgs.from_cli_args(given)
    return args, _without_its_own_code(args, folder)


def _without_its_own_code(args: Any, folder: Path) -> list[str]:
    """Where the checkpoint's own Python code is needed and is not here: read the config without it, and say so."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    place = str((config.get("auto_map") or {}).get("AutoConfig", "")).partition(".")[0]
    if args.trust_remote_code and place and (folder / f"{place}.py").is_file():
        return []
    kind, args.trust_remote_code = config.get("model_type"), False
    if kind in _CONFIG_REGISTRY or kind in CONFIG_MAPPING or args.config_format != "auto":
        return []
    args.config_format = _as_it_stands()
    return [f"neither vLLM nor transformers has a config class for {kind!r}: its fields were read as they stand"]


def _as_it_stands() -> str:
    """Register, once, a reader that adds nothing to the fields of a config, and name it."""
    from transformers import PreTrainedConfig
    from vllm.transformers_utils import config as configs
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    class AsItStands(ConfigParserBase):
        def parse(self, model: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], Any]:
            fields = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
            return fields, PreTrainedConfig.from_dict(dict(fields))

    if AS_IT_STANDS not in configs._CONFIG_FORMAT_TO_CONFIG_PARSER:
        configs.register_config_parser(AS_IT_STANDS)(AsItStands)
    return AS_IT_STANDS


def _model_config(args: Any) -> Any:
    try:
        model = args.create_model_config()
    except ValueError as error:
        raise RefusedError(f"vLLM does not take this model with these options: {_said(error)}") from error
    except Exception as error:
        raise NotKnownError(f"{type(error).__name__}: {_said(error)}") from error
    layers, positions = model.get_total_num_hidden_layers(), model.max_model_len
    if layers > MOST_LAYERS or positions > MOST_POSITIONS:
        raise NotKnownError(f"{layers} layers and {positions} positions are more than is built here")
    return model


def _facts(model: Any, args: Any, notes: list[str]) -> Answers:
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    text = model.hf_text_config
    return Answers(
        architecture=str(model.architecture),
        model_type=str(getattr(text, "model_type", "")),
        is_mla=bool(model.use_mla),
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=resolve_kv_cache_dtype_string(args.kv_cache_dtype, model),
        hidden_size=model.get_hidden_size(),
        heads=model.model_arch_config.total_num_attention_heads,
        layers=model.get_total_num_hidden_layers(),
        max_position=getattr(text, "max_position_embeddings", None) or model.max_model_len,
        notes=notes,
    )


def _checks(args: Any, model: Any, arch: str) -> dict[str, Callable[[], Any]]:
    """vLLM's own checks of options and card, by what they look at."""
    checks: dict[str, Callable[[], Any]] = {
        "parallelism": lambda: model.verify_with_parallel_config(args),
        "the scheduler": lambda: _scheduler(args, model),
    }
    if model.quantization is not None and arch.startswith("gfx"):
        checks["quantisation on ROCm"] = lambda: _rocm(arch).RocmPlatform.verify_quantization(model.quantization)
    return checks


def _scheduler(args: Any, model: Any) -> None:
    from vllm.config import SchedulerConfig

    SchedulerConfig(
        max_model_len=model.max_model_len,
        is_encoder_decoder=model.is_encoder_decoder,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_chunked_prefill=args.enable_chunked_prefill is not False,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
    )


@contextmanager
def _as_on(arch: str) -> Iterator[None]:
    """For a block: no network, no other process, no quantisation refused for this machine, the card's own models."""
    import huggingface_hub.constants
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    def inspect(self: Any) -> Any:
        with _models_of(arch, self.module_name):
            return registry._ModelInfo.from_model_cls(self.load_model_cls())

    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(registry._LazyRegisteredModel, "inspect_model_cls", inspect),
        mock.patch.object(type(current_platform), "verify_quantization", return_value=None),
        mock.patch.dict(os.environ),
    ):
        yield


@contextmanager
def _models_of(arch: str, module: str) -> Iterator[None]:
    """vLLM keeps some models once for each vendor, in ``vllm.models``, and picks one when it is imported."""
    from vllm.platforms import current_platform

    if not arch.startswith("gfx") or not module.startswith("vllm.models."):
        yield
        return
    _rocm(arch)
    with mock.patch.object(type(current_platform), "is_rocm", return_value=True):
        yield


def _rocm(arch: str) -> Any:
    """vLLM's ROCm platform; at its import it asks for the card."""
    import torch

    card = SimpleNamespace(gcnArchName=arch, multi_processor_count=0)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=card):
        import vllm.platforms.rocm as rocm
    return rocm


def _said(error: BaseException) -> str:
    """The sentence of an error, on one line; of pydantic's, vLLM's own within."""
    findings = getattr(error, "errors", None)
    if callable(findings):
        return "; ".join(str(found["msg"]).removeprefix("Value error, ") for found in findings())
    return " ".join(str(error).split()) or type(error).__name__
