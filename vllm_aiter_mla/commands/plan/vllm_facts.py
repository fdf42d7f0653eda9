# SPDX-License-Identifier: Apache-2.0
"""Facts from vLLM about ``vllm serve`` on an AMD card: its finished ``VllmConfig``, and its MLA layers.

The plugin is loaded, so the engine's own gate decides. ``simulated_card`` says what is simulated if vLLM finds no AMD
card. ``commands.compat.rocm_config`` says what is simulated for a model without weights.
"""

import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_aiter_mla.admission import REMEDIES, ConfigView, Skip
from vllm_aiter_mla.commands import serve_options
from vllm_aiter_mla.commands.compat import rocm_config, vllm_options
from vllm_aiter_mla.commands.plan import simulated_card
from vllm_aiter_mla.commands.plan.config_source import cached_config
from vllm_aiter_mla.commands.plan.record import Model, NotKnownError, PlanOptions
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, Settings, near_misses

# A draft of such a method has no repository. vLLM also accepts these names as names of draft models.
DRAFTS_WITHOUT_REPOSITORY = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
FUSIONS_WITHOUT_MLA = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
"""vLLM's fusions for attention without MLA, as fields of its PassConfig."""
MAX_MESSAGE_CHARACTERS = 400
"""The longest message of vLLM, in characters, that is shown whole."""
MAX_LAYERS, MAX_POSITIONS = 2**9, 2**24


@dataclass(frozen=True)
class LoadedVllm:
    """vLLM as this process has loaded it."""

    arch: str  # of the card that vLLM finds
    has_simulated_card: bool  # there is no AMD card here
    version: str
    switches: dict[str, bool]  # ``vllm_options.VARIABLES`` as vLLM reads them


@dataclass(frozen=True)
class UserOptions:
    """Options that the user gives. None stands for vLLM's default. ``notes`` say how the model's config was read."""

    settings: Settings
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    notes: list[str]


@dataclass(frozen=True)
class GateResult:
    """Limit and integration that the gate put into the config."""

    limit: int  # the decode limit in tokens
    integration: str  # "passes" or "module"


@dataclass(frozen=True)
class EngineFacts:
    """Fields of vLLM's finished config."""

    gate: GateResult | None  # None if the gate did not change the config
    view: ConfigView  # for admission
    options: PlanOptions
    compile_ranges: tuple[tuple[int, int], ...]  # (first, last) in tokens
    graph_sizes: compat_config.GraphSizes


@dataclass(frozen=True)
class VllmFacts:
    """Facts from vLLM about one model and one set of options."""

    user_options: UserOptions
    model: Model  # from ``model_facts``
    engine: EngineFacts
    layers: list[tuple[rocm_config.LayerKind, int]]  # each with its count, the most frequent first; empty without MLA
    skip: Skip | None = None  # an error that vLLM raised while its layers were built


def load_vllm(arch: str | None) -> LoadedVllm:
    """Load vLLM with the plugin, on this machine's card or on a simulated one.

    A simulated card has the architecture ``arch``. Without ``arch`` it is that of torch's card, or else gfx942.

    Raises:
        ValueError: this machine has another card, or vLLM cannot read one of its variables.
    """
    from vllm_aiter_mla.kernels import device

    this_device = device.card()
    if has_simulated_card := this_device.rocm is None or not rocm_config.has_amd_card():
        vllm_arch = arch or (this_device.arch if this_device.arch in simulated_card.CARDS else "gfx942")
        simulated_card.simulate_rocm(vllm_arch)
    else:
        vllm_arch = rocm_config.driver_arch()
        if arch not in (None, vllm_arch):
            raise ValueError(
                f"--arch {arch}: this machine has a {vllm_arch}, and a plan simulates no card where there is one"
            )
    vllm_options.load_plugins()
    rocm_config.inspect_models_in_process()
    return LoadedVllm(vllm_arch, has_simulated_card, str(release.vllm_version()), vllm_options.switch_states())


def parse_options(folder: Path, arguments: Sequence[str]) -> tuple[Any, UserOptions]:
    """Return vLLM's ``AsyncEngineArgs`` with the plugin on and without a tokenizer, and the user's options.

    Raises:
        ValueError: an option is wrong.
    """
    parsed = vllm_options.parse_serve_options([str(folder), *arguments])
    if not isinstance(parsed.additional_config or {}, dict):
        raise ValueError(f"--additional-config {parsed.additional_config}: a JSON object expected")
    settings = compat_config.settings_of(parsed)
    setattr(parsed.compilation_config.pass_config, FLAG_FIELD, True)
    # Strict mode would raise at the first reason.
    plugin_options = dict((parsed.additional_config or {}).get(NAMESPACE, {})) | {"enabled": True, "strict": False}
    parsed.additional_config = {**(parsed.additional_config or {}), NAMESPACE: plugin_options}
    _check_named_repositories(parsed, folder)
    _check_revision(parsed.revision, folder)
    tokenizer_options = vllm_options.reset_options(parsed, vllm_options.TOKENIZER_OPTIONS.__contains__)
    parsed.model, parsed.skip_tokenizer_init, parsed.tokenizer = str(folder), True, None
    engine_args, notes = vllm_options.engine_args(parsed, folder)
    if tokenizer_options:
        notes.append(f"{', '.join(tokenizer_options)}: ignored, because a plan has no tokenizer")
    notes += [
        f"pass_config.{name} matches nothing on MLA and adds a compile range (vllm#55720)"
        for name in FUSIONS_WITHOUT_MLA
        if getattr(parsed.compilation_config.pass_config, name, None)
    ]
    for key in near_misses(parsed.additional_config, settings.enabled):
        notes.append(f"additional_config.{key} is not read by this plugin, whose key is {NAMESPACE}")
    return engine_args, UserOptions(settings, parsed.max_num_seqs, parsed.max_num_batched_tokens, notes)


def _check_named_repositories(parsed: Any, folder: Path) -> None:
    """Raise ValueError if an option or the config names a repository that is not here. vLLM would raise too."""
    fields = vllm_options.config_fields(folder)
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    speculative_config = parsed.speculative_config if isinstance(parsed.speculative_config, dict) else {}
    draft = speculative_config.get("model") or getattr(parsed, "spec_model", None)
    method = speculative_config.get("method") or getattr(parsed, "spec_method", None)
    if method in DRAFTS_WITHOUT_REPOSITORY or draft in DRAFTS_WITHOUT_REPOSITORY:
        draft = None
    for role, name, revision in (
        ("the draft", draft, speculative_config.get("revision")),
        ("the draft's verifier", verifier.get("name_or_path"), None),
        ("--hf-config-path", parsed.hf_config_path, parsed.revision),
    ):
        if not name or Path(str(name)).exists():
            continue
        try:
            cached_config(str(name), revision)
        except LookupError as error:
            raise ValueError(f"{role} {name} is not in the local cache; give a folder") from error


def _check_revision(revision: str | None, folder: Path) -> None:
    """Raise ValueError if a file of ``--config`` names another revision than the one whose config is in ``folder``."""
    repository = folder.parent.parent.name  # of the Hugging Face cache: models--ORGANISATION--NAME/snapshots/COMMIT
    if revision is None or folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return
    with suppress(LookupError):
        if cached_config(repository.removeprefix("models--").replace("--", "/"), revision).parent == folder:
            return
    raise ValueError(f"--revision {revision}: the config of another revision was read; name it on the command line")


def collect_facts(folder: Path, arguments: Sequence[str]) -> VllmFacts:
    """Return the facts from vLLM for the config in ``folder`` and these options, with the plugin on.

    Raises:
        ValueError: vLLM rejects the model or an option.
        NotKnownError: vLLM raised another error before its config was finished.
    """
    user_options, engine = None, None
    try:
        engine_args, user_options = parse_options(folder, arguments)
        vllm_config = rocm_config.create_engine_config(engine_args)
        model, engine = model_facts(vllm_config.model_config), engine_facts(vllm_config, user_options.settings)
        layers = rocm_config.build_mla_layers(vllm_config) if model.is_mla else []
        # vLLM sets the block size when the layers are built.
        engine = replace(engine, options=replace(engine.options, block_size=vllm_config.cache_config.block_size))
    except (Exception, SystemExit) as error:
        if user_options is None or engine is None:
            raise _user_error(error, arguments, before_parsing=user_options is None) from error
        config_class_error = vllm_options.missing_field_error(error)
        code = "config_class" if config_class_error else "not_known"
        skip = Skip(code, str(config_class_error or _message_with_location(error)))
        return VllmFacts(user_options, model, engine, [], skip)
    return VllmFacts(user_options, model, engine, layers)


def _user_error(error: BaseException, arguments: Sequence[str], before_parsing: bool) -> Exception:
    """Return an error for the user, with a message of one line, for an error that vLLM raised.

    The result is a ValueError if the model or an option is wrong. An option is also wrong if it names a file, a
    repository or a module that is not there. Otherwise the result is a NotKnownError. ``before_parsing`` says that the
    error was raised before the options were parsed.
    """
    class_errors = causes(error, (vllm_options.ConfigClassError,))
    if config_class_error := vllm_options.missing_field_error(error) or next(class_errors, None):
        return NotKnownError(f"not known: {config_class_error} -> {REMEDIES['config_class']}")
    import_error = next(causes(error, (ImportError,) if before_parsing else (ImportError, OSError)), None)
    if import_error is not None and not _is_named_by_option(getattr(import_error, "name", None), arguments):
        library = getattr(import_error, "name", None) or "something"
        return NotKnownError(f"not known, vLLM lacks {library} on this machine: {_message_with_location(error)}")
    message = _user_message(error)
    if before_parsing or message.startswith("--"):
        return ValueError(message)
    if isinstance(error, (ValueError, NotImplementedError)):
        return ValueError(f"vLLM does not take this model with these options: {message or type(error).__name__}")
    return NotKnownError(f"not known, vLLM failed on this model here: {_message_with_location(error)}")


def _user_message(error: BaseException) -> str:
    """Return the message of an error, without the parts for programmers.

    An error of pydantic holds several findings. The message names each with its option.
    """
    findings, descriptions = getattr(error, "errors", None), []
    if callable(findings):  # pydantic's
        for finding in findings():
            option = ".".join(map(str, finding["loc"])).replace("_", "-")
            descriptions.append(f"--{option} {finding['input']}: {finding['msg']}" if option else finding["msg"])
    message = " ".join("; ".join(descriptions).replace("Value error, ", "").split()) or " ".join(str(error).split())
    message = re.sub(r" \[type=\w+, input_value=.*?\]( For further information visit \S+)?", "", message)
    return _shorten(
        re.sub(r"<function loads at 0x[0-9a-f]+>", "JSON", message) + serve_options.renamed_field_hints(message)
    )


def causes(error: BaseException, error_types: tuple[type[BaseException], ...]) -> Iterator[BaseException]:
    """Yield those of ``error_types`` among this error and the errors that caused it."""
    if isinstance(error, error_types):
        yield error
    findings = getattr(error, "errors", None)
    nested = [finding.get("ctx", {}).get("error") for finding in findings()] if callable(findings) else []  # pydantic's
    for cause in (error.__cause__, error.__context__, *nested):
        if isinstance(cause, BaseException):
            yield from causes(cause, error_types)


def _is_named_by_option(module: str | None, arguments: Sequence[str]) -> bool:
    """Return whether an option has the module's name, as a whole name or as the start of a dotted one."""
    return bool(module) and any(re.search(rf"(?<![\w.]){re.escape(str(module))}(?!\w)", text) for text in arguments)


def _shorten(message: str) -> str:
    """Return a message that fits a screen. A long one is cut after its first sentence, and the log has all of it."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    print(message, file=sys.stderr)  # seen with --verbose
    return (
        textwrap.shorten(re.split(r"[.;] ", message)[0], MAX_MESSAGE_CHARACTERS, placeholder=" ...")
        + " (--verbose shows the rest)"
    )


def _message_with_location(error: BaseException) -> str:
    """Return type and message of an error, and the last line of vLLM's sources in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    location = next((frame for frame in reversed(frames) if f"{os.sep}vllm{os.sep}" in frame.filename), frames[-1])
    sentence = _shorten(" ".join(str(error).split()))
    return f"{type(error).__name__}: {sentence} ({Path(location.filename).name}:{location.lineno} in {location.name})"


def model_facts(model_config: Any) -> Model:
    """Return the facts in a ``ModelConfig``, without notes and kinds of layers.

    Raises:
        ValueError: the model is too large to be built.
    """
    num_layers, num_positions = model_config.get_total_num_hidden_layers(), model_config.max_model_len
    if num_layers > MAX_LAYERS or num_positions > MAX_POSITIONS:
        raise ValueError(f"{num_layers} layers and {num_positions} positions are more than a plan builds")
    return Model(
        architecture=str(model_config.architecture),
        is_mla=bool(model_config.use_mla),
        dtype=_dtype_name(model_config),
        num_layers=num_layers,
        max_position=getattr(model_config.hf_text_config, "max_position_embeddings", None) or num_positions,
        listed_layers=len(compat_config.mla_layers(model_config)),
    )


def _dtype_name(model_config: Any) -> str:
    return str(model_config.dtype).removeprefix("torch.")


def connector_names(transfer_config: Any) -> tuple[str, ...]:
    """Return the names of the KV connectors of a ``KVTransferConfig``, and of those inside a MultiConnector."""
    if transfer_config is None:
        return ()
    nested = (transfer_config.kv_connector_extra_config or {}).get("connectors") or ()
    return (str(transfer_config.kv_connector), *(str(connector.get("kv_connector")) for connector in nested))


def engine_facts(vllm_config: Any, settings: Settings) -> EngineFacts:
    """Return the facts in a finished ``VllmConfig``, with the plugin's ``settings``."""
    compilation_config, scheduler_config = vllm_config.compilation_config, vllm_config.scheduler_config
    parallel_config, cache_config = vllm_config.parallel_config, vllm_config.cache_config
    our_pass, view = compat_config.engaged_pass(vllm_config), compat_config.read(vllm_config)
    return EngineFacts(
        gate=None if our_pass is None else GateResult(our_pass.limit, our_pass.integration),
        view=view,
        options=PlanOptions(
            tp=parallel_config.tensor_parallel_size,
            pp=parallel_config.pipeline_parallel_size,
            dp=parallel_config.data_parallel_size,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            block_size=cache_config.block_size,
            num_drafts=vllm_config.num_speculative_tokens or 0,
            kv_cache_dtype=str(cache_config.cache_dtype),
            dcp=view.dcp,
            pcp=view.pcp,
            enforce_eager=view.enforce_eager,
            mode=view.mode,
            dtype=_dtype_name(vllm_config.model_config),
            settings=settings,
            attention=view.attention,
            connectors=connector_names(vllm_config.kv_transfer_config),
            layerwise=rocm_config.has_layerwise_connector(vllm_config),
            sleep=bool(vllm_config.model_config.enable_sleep_mode),
        ),
        compile_ranges=tuple(
            (compile_range.start, compile_range.end) for compile_range in compilation_config.get_compile_ranges()
        )
        if compilation_config.mode
        else (),
        graph_sizes=compat_config.graph_sizes(vllm_config),
    )
