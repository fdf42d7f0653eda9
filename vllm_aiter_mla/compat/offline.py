"""What the commands ask vLLM without an engine: the options of ``vllm serve``, attention classes, ops."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from vllm_aiter_mla.admission import ConfigView
from vllm_aiter_mla.compat import config as compat_config

# Where `vllm serve` has its parser: since 0.33, in 0.32, before.
SERVE_PARSERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)


class VllmMissingError(RuntimeError):
    """vLLM cannot be imported, so its options cannot be read."""


class OptionError(ValueError):
    """An option is wrong; the message names it and its value."""


def refuse(message: str) -> NoReturn:
    """Raise OptionError, where argparse would print and exit."""
    raise OptionError(message)


def serve_options(arguments: Sequence[str]) -> Any:
    """Return the options of ``vllm serve``, read by vLLM's own parser: a namespace with vLLM's own config objects.

    The plugin must be registered before, or its own options are unknown.

    Raises:
        VllmMissingError: vLLM is not importable.
        OptionError: an option is wrong; vLLM's sentence, with the closest name where a name is not known.
    """
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise VllmMissingError(f"options of `vllm serve` are read by vLLM's own parser: {error}") from error
    parser = _serve_parser(FlexibleArgumentParser())
    parser.error = refuse
    given: list[str] = []
    for action in parser._actions:
        if action.dest == "compilation_config":
            action.type = partial(_compilation_config, action.type, given)
    try:
        parsed = parser.parse_args(list(arguments))
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"vLLM's parser of options: {type(error).__name__}: {error}") from error
    parsed.compilation_given = json.loads(given[-1]) if given else {}
    return parsed


def pass_asked_for(parsed: Any, name: str) -> bool:
    """Return whether a switch of ``pass_config`` was given as true; vLLM turns some off where there is no card."""
    from pydantic import TypeAdapter

    value = (parsed.compilation_given.get("pass_config") or {}).get(name)
    return value is not None and TypeAdapter(bool).validate_python(value)


def view_of_options(parsed: Any) -> ConfigView:
    """Return what admission reads of a config, as far as the options tell it; the rest has its defaults."""
    compilation = parsed.compilation_config
    mode, ops = compilation.mode, compilation.splitting_ops
    unset = "VLLM_COMPILE" if int(parsed.optimization_level) > 0 else "NONE"
    return ConfigView(
        enforce_eager=bool(parsed.enforce_eager),
        mode=unset if mode is None else str(mode.name),
        backend=compilation.backend or "inductor",
        dcp=getattr(parsed, "decode_context_parallel_size", 1),
        pcp=getattr(parsed, "prefill_context_parallel_size", 1),
        hisparse=getattr(parsed.attention_config, "hisparse_config", None) is not None,
        kv_cache_dtype=str(parsed.kv_cache_dtype),
        use_inductor_graph_partition=compilation.use_inductor_graph_partition,
        splitting_ops=None if ops is None else tuple(ops),
        integration=compat_config.integration_asked(compat_config.settings_of(parsed)),
    )


def backend_name(parsed: Any) -> str:
    """Return the attention backend that the options name, in either spelling; "" where vLLM chooses."""
    config = getattr(parsed, "attention_config", None)
    chosen = getattr(parsed, "attention_backend", None) or getattr(config, "backend", None)
    return str(getattr(chosen, "name", chosen) or "")


def impl_name(backend: str) -> str:
    """Return the class name of the attention implementation behind a name in vLLM's backend registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum[backend].value
    # CUSTOM has no class: a plugin registers one.
    return str(path).rpartition(".")[2].removesuffix("Backend") + "Impl" if path else f"another plugin's ({backend})"


def fused_rope_kv_write() -> Callable[..., None] | str:
    """Return vLLM's op that rotates q_pe and k_pe in place and writes the KV rows, or why it is missing."""
    try:
        from vllm import _custom_ops
    except Exception as error:
        return f"vllm is not importable: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    import torch

    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla_rope_fused"):
        return "this vllm has no concat_and_cache_mla_rope_fused"
    return _custom_ops.concat_and_cache_mla_rope_fused


def _serve_parser(parser: Any) -> Any:
    for name in SERVE_PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(parser)
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser.add_argument("model_tag", nargs="?")
    return AsyncEngineArgs.add_cli_args(parser)


def _compilation_config(read: Callable[[str], Any], given: list[str], text: str) -> Any:
    """Read a compilation config by vLLM's ``read`` and keep the text in ``given``. An error is one line."""
    given.append(text)
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        findings = getattr(error.__cause__, "errors", None)
        if findings is None:
            raise
        raise argparse.ArgumentTypeError("; ".join(map(_finding, findings()))) from error


def _finding(found: Any) -> str:
    """Format one of pydantic's findings: ``pass_config.fuse_norm_qant=True: ...; did you mean 'fuse_norm_quant'?``."""
    from vllm.config import CompilationConfig, PassConfig

    path = tuple(map(str, found["loc"]))
    text = f"{'.'.join(path)}{'=' * bool(path)}{found['input']!r}: {found['msg']}"
    if found["type"] != "unexpected_keyword_argument" or len(path) > 2:
        return text
    known = [field.name for field in dataclasses.fields(CompilationConfig if len(path) == 1 else PassConfig)]
    close = difflib.get_close_matches(path[-1], known, n=1)
    return f"{text}; did you mean {close[0]!r}?" if close else text
