# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself decides for ``vllm serve`` on an AMD card: its finished ``VllmConfig``, and its MLA layers.

The plugin is loaded, so the engine's own gate decides. ``card`` says what is made up where vLLM finds no AMD card,
and ``commands.compat.rocm_config`` what is made up for a model without weights.
"""

import importlib.util
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_aiter_mla.admission import REMEDIES, ConfigView, Skip
from vllm_aiter_mla.commands import serve_options
from vllm_aiter_mla.commands.compat import offline, rocm_config
from vllm_aiter_mla.commands.plan import card
from vllm_aiter_mla.commands.plan.model import cached_config
from vllm_aiter_mla.commands.plan.record import Model, NotKnownError, Options
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, Settings, near_misses

# A draft of such a method has no repository; vLLM takes the names as those of models too.
DRAFTS_WITHOUT_REPOSITORY = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
FUSIONS_WITHOUT_MLA = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
"""vLLM's fusions for attention without MLA, as fields of its PassConfig."""
LONGEST_MESSAGE = 400
"""Letters of a message of vLLM's that is passed on as it is."""
MAX_LAYERS, MOST_POSITIONS = 2**9, 2**24


@dataclass(frozen=True)
class LoadedVllm:
    """vLLM as this process has loaded it."""

    arch: str  # the card that it sees
    is_made_up: bool  # the card is: vLLM finds none here
    version: str
    switches: dict[str, bool]  # ``offline.VARIABLES`` as it reads them


@dataclass(frozen=True)
class UserOptions:
    """What the user asks for, None where vLLM's default counts; ``notes`` say how the model's config was read."""

    settings: Settings
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    notes: list[str]


@dataclass(frozen=True)
class Gate:
    """What the gate put into the config."""

    limit: int  # the decode limit in tokens
    integration: str  # "passes" or "module"


@dataclass(frozen=True)
class EngineFacts:
    """What the options became in vLLM's finished config."""

    gate: Gate | None  # None where the gate left the config as it was
    view: ConfigView  # what admission reads
    options: Options
    ranges: tuple[tuple[int, int], ...]  # compile ranges, (first, last) in tokens
    graphs: compat_config.GraphSizes


@dataclass(frozen=True)
class Answer:
    """What vLLM decides for one model and one set of options."""

    user_options: UserOptions
    model: Model  # with what ``model_facts`` knows
    engine: EngineFacts
    layers: list[tuple[rocm_config.LayerKind, int]]  # counted, the most frequent first; empty without MLA
    skip: Skip | None = None  # the error that the layers raise


def load_vllm(arch: str | None) -> LoadedVllm:
    """Load vLLM with the plugin, on this machine's card, or on one made up: of ``arch``, else as torch's, else gfx942.

    Raises:
        ValueError: this machine has another card, or vLLM cannot read one of its variables.
    """
    from vllm_aiter_mla.kernels import device

    here = device.card()
    # vLLM finds AMD's cards through amdsmi only.
    if is_made_up := here.rocm is None or importlib.util.find_spec("amdsmi") is None:
        seen = arch or (here.arch if here.arch in card.CARDS else "gfx942")
        card.pretend_rocm(seen)
    else:
        seen = rocm_config.card_of_driver()
        if arch not in (None, seen):
            raise ValueError(f"--arch {arch}: this machine has a {seen}; a plan makes nothing up where a card is")
    offline.load_plugins()
    rocm_config.inspect_in_process()
    return LoadedVllm(seen, is_made_up, str(release.vllm_version()), offline.switches())


def planned_args(folder: Path, arguments: Sequence[str]) -> tuple[Any, UserOptions]:
    """Return vLLM's ``AsyncEngineArgs`` with the plugin switched on, for a config without a tokenizer.

    Raises:
        ValueError: an option is wrong.
    """
    parsed = offline.serve_options([str(folder), *arguments])
    if not isinstance(parsed.additional_config or {}, dict):
        raise ValueError(f"--additional-config {parsed.additional_config}: a JSON object expected")
    settings = compat_config.settings_of(parsed)
    setattr(parsed.compilation_config.pass_config, FLAG_FIELD, True)
    # Strict mode would end the plan at the first reason.
    own = dict((parsed.additional_config or {}).get(NAMESPACE, {})) | {"enabled": True, "strict": False}
    parsed.additional_config = {**(parsed.additional_config or {}), NAMESPACE: own}
    _check_what_is_named(parsed, folder)
    without_tokenizer = offline.reset(parsed, offline.TOKENIZER_OPTIONS.__contains__)
    parsed.model, parsed.skip_tokenizer_init, parsed.tokenizer = str(folder), True, None
    args, notes = offline.engine_args(parsed, folder)
    if without_tokenizer:
        notes.append(f"{', '.join(without_tokenizer)}: not looked at, because a plan has no tokenizer")
    notes += [
        f"pass_config.{name} matches nothing on MLA and adds a compile range (vllm#55720)"
        for name in FUSIONS_WITHOUT_MLA
        if getattr(parsed.compilation_config.pass_config, name, None)
    ]
    for key in near_misses(parsed.additional_config):
        notes.append(f"additional_config.{key} is not read by this plugin, whose key is {NAMESPACE}")
    return args, UserOptions(settings, parsed.max_num_seqs, parsed.max_num_batched_tokens, notes)


def _check_what_is_named(parsed: Any, folder: Path) -> None:
    """Raise ValueError where an option or the config names a repository that is not here: vLLM would refuse it."""
    fields = offline.config_of(folder)
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    spec = parsed.speculative_config if isinstance(parsed.speculative_config, dict) else {}
    draft = spec.get("model") or getattr(parsed, "spec_model", None)
    method = spec.get("method") or getattr(parsed, "spec_method", None)
    if method in DRAFTS_WITHOUT_REPOSITORY or draft in DRAFTS_WITHOUT_REPOSITORY:
        draft = None
    for what, name, revision in (
        ("the draft", draft, spec.get("revision")),
        ("the draft's verifier", verifier.get("name_or_path"), None),
        ("--hf-config-path", parsed.hf_config_path, parsed.revision),
    ):
        if not name or Path(str(name)).exists():
            continue
        try:
            cached_config(str(name), revision)
        except LookupError as error:
            raise ValueError(f"{what} {name} is not in the local cache; give a folder") from error


def ask_vllm(folder: Path, arguments: Sequence[str]) -> Answer:
    """Return what vLLM decides for the config in ``folder`` and these options, with the plugin switched on.

    Raises:
        ValueError: vLLM does not take the model or an option.
        NotKnownError: vLLM raises an error of its own before it is configured.
    """
    user_options, engine = None, None
    try:
        args, user_options = planned_args(folder, arguments)
        config = rocm_config.finished_config(args)
        model, engine = model_facts(config.model_config), engine_facts(config, user_options.settings)
        layers = rocm_config.mla_layers(config) if model.is_mla else []
        # Building the layers sets the size of a block.
        engine = replace(engine, options=replace(engine.options, block_size=config.cache_config.block_size))
    except (Exception, SystemExit) as error:
        if user_options is None or engine is None:
            raise _our_error(error, arguments, before_parsing=user_options is None) from error
        ours = offline.missing_field_error(error)
        skip = Skip("config_class", str(ours)) if ours else Skip("not_known", _with_its_line(error))
        return Answer(user_options, model, engine, [], skip)
    return Answer(user_options, model, engine, layers)


def _our_error(error: BaseException, arguments: Sequence[str], before_parsing: bool) -> Exception:
    """Return our own error, with a message of one line, for an error of vLLM's.

    It is a ValueError if the model or an option is wrong: also if the option names a file, a repository or a module
    that is not there. Otherwise it is a NotKnownError. ``before_parsing``: the error came before the options were read.
    """
    if ours := offline.missing_field_error(error) or next(errors_behind(error, (offline.ConfigClassError,)), None):
        return NotKnownError(f"not known: {ours} -> {REMEDIES['config_class']}")
    lacks = next(errors_behind(error, (ImportError,) if before_parsing else (ImportError, OSError)), None)
    if lacks is not None and not _is_named(getattr(lacks, "name", None), arguments):
        what = getattr(lacks, "name", None) or "something"
        return NotKnownError(f"not known, vLLM lacks {what} on this machine: {_with_its_line(error)}")
    message = _message(error)
    if before_parsing or message.startswith("--"):
        return ValueError(message)
    if isinstance(error, (ValueError, NotImplementedError)):
        return ValueError(f"vLLM does not take this model with these options: {message or type(error).__name__}")
    return NotKnownError(f"not known, vLLM could not be asked about this model here: {_with_its_line(error)}")


def _message(error: BaseException) -> str:
    """Return what an error says, without the parts that only a programmer reads.

    An error of pydantic holds several findings: each is named with its option.
    """
    findings, named = getattr(error, "errors", None), []
    if callable(findings):  # pydantic's
        for finding in findings():
            option = ".".join(map(str, finding["loc"])).replace("_", "-")
            named.append(f"--{option} {finding['input']}: {finding['msg']}" if option else finding["msg"])
    message = " ".join("; ".join(named).replace("Value error, ", "").split()) or " ".join(str(error).split())
    message = re.sub(r" \[type=\w+, input_value=.*?\]( For further information visit \S+)?", "", message)
    return _first_sentence(
        re.sub(r"<function loads at 0x[0-9a-f]+>", "JSON", message) + serve_options.renamed_fields(message)
    )


def errors_behind(error: BaseException, kinds: tuple[type[BaseException], ...]) -> Iterator[BaseException]:
    """Yield the errors of ``kinds`` that led to this one."""
    if isinstance(error, kinds):
        yield error
    findings = getattr(error, "errors", None)
    inner = [finding.get("ctx", {}).get("error") for finding in findings()] if callable(findings) else []  # pydantic's
    for earlier in (error.__cause__, error.__context__, *inner):
        if isinstance(earlier, BaseException):
            yield from errors_behind(earlier, kinds)


def _is_named(module: str | None, arguments: Sequence[str]) -> bool:
    """Whether an option names the module, as the whole of a name or the start of a dotted one."""
    return bool(module) and any(re.search(rf"(?<![\w.]){re.escape(str(module))}(?!\w)", text) for text in arguments)


def _first_sentence(message: str) -> str:
    """Return a message that fits a screen: its first sentence, where there is more; the log has the whole one."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    print(message, file=sys.stderr)  # seen with --verbose
    return (
        textwrap.shorten(re.split(r"[.;] ", message)[0], LONGEST_MESSAGE, placeholder=" ...")
        + " (--verbose shows the rest)"
    )


def _with_its_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if f"{os.sep}vllm{os.sep}" in frame.filename), frames[-1])
    sentence = _first_sentence(" ".join(str(error).split()))
    return f"{type(error).__name__}: {sentence} ({Path(at.filename).name}:{at.lineno} in {at.name})"


def model_facts(model: Any) -> Model:
    """Return what a ``ModelConfig`` says, without notes and layers.

    Raises:
        ValueError: it is too large to be built.
    """
    layers, positions = model.get_total_num_hidden_layers(), model.max_model_len
    if layers > MAX_LAYERS or positions > MOST_POSITIONS:
        raise ValueError(f"{layers} layers and {positions} positions are more than is built here")
    return Model(
        architecture=str(model.architecture),
        is_mla=bool(model.use_mla),
        dtype=_dtype(model),
        layers=layers,
        max_position=getattr(model.hf_text_config, "max_position_embeddings", None) or positions,
        listed_layers=len(compat_config.mla_layers(model)),
    )


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def connectors(transfer: Any) -> tuple[str, ...]:
    """Return the KV connectors of a ``KVTransferConfig`` by name, those that a MultiConnector holds too."""
    if transfer is None:
        return ()
    inner = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    return (str(transfer.kv_connector), *(str(connector.get("kv_connector")) for connector in inner))


def engine_facts(config: Any, settings: Settings) -> EngineFacts:
    """Return what a finished ``VllmConfig`` says, under the plugin's ``settings``."""
    compilation, scheduler, parallel = config.compilation_config, config.scheduler_config, config.parallel_config
    our_pass, view = compat_config.engaged_pass(config), compat_config.read(config)
    return EngineFacts(
        gate=None if our_pass is None else Gate(our_pass.limit, our_pass.integration),
        view=view,
        options=Options(
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dp=parallel.data_parallel_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            block_size=config.cache_config.block_size,
            num_drafts=config.num_speculative_tokens,
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            dcp=view.dcp,
            pcp=view.pcp,
            enforce_eager=view.enforce_eager,
            mode=view.mode,
            dtype=_dtype(config.model_config),
            settings=settings,
            attention=view.attention,
            connectors=connectors(config.kv_transfer_config),
            layerwise=rocm_config.has_layerwise_connector(config),
            sleep=bool(config.model_config.enable_sleep_mode),
        ),
        ranges=tuple((part.start, part.end) for part in compilation.get_compile_ranges()) if compilation.mode else (),
        graphs=compat_config.graph_sizes(config),
    )
