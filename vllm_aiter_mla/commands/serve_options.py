# SPDX-License-Identifier: Apache-2.0
"""Check names of options of ``vllm serve`` against vLLM's sources, so that a misspelt one ends a command at once.

vLLM's own parser checks them again later. Its import takes ten seconds.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SOURCE_PATTERNS = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
OPPOSITE_PREFIXES = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"))
"""Prefixes of an option and of its opposite in vLLM's parser. The last two pairs exist from 0.33 on."""
OFF_PREFIXES = ("--no-", "--disable-")
MIN_SIMILARITY = 0.75
"""The lowest ratio of difflib at which two names are similar. vLLM's parser reports all other unknown options."""
DROP_HINT = "vLLM no longer has it, drop it"
OLD_OPTIONS = {
    "--disable-log-requests": "vLLM no longer logs requests by default, drop it",
    "--enable-reasoning": "vLLM no longer has it, --reasoning-parser is enough",
    "--cuda-graph-sizes": "it is now --cudagraph-capture-sizes",
    "--max-seq-len-to-capture": "it is now --max-cudagraph-capture-size, in tokens of a batch",
    "--full-cuda-graph": "it is now -cc.cudagraph_mode=FULL",
    "--compilation-level": "it is now -cc.mode",
    "--task": "it is now --runner",
    "--guided-decoding-backend": "it is now --structured-outputs-config.backend",
    "--rope-scaling": "it is now a part of --hf-overrides",
    "--rope-theta": "it is now a part of --hf-overrides",
    "--speculative-model": "it is now model in --speculative-config",
    "--num-speculative-tokens": "it is now num_speculative_tokens in --speculative-config",
    "--speculative-draft-tensor-parallel-size": "it is now draft_tensor_parallel_size in --speculative-config",
    "--num-redundant-experts": "it is now --eplb-config.num_redundant_experts",
    "--eplb-window-size": "it is now --eplb-config.window_size",
    "--enable-multimodal-encoder-data-parallel": "it is now --mm-encoder-tp-mode data",
    "--disable-mm-preprocessor-cache": "it is now --mm-processor-cache-gb 0",
    "--override-pooler-config": "it is now --pooler-config",
    **dict.fromkeys(
        ("--num-scheduler-steps", "--multi-step-stream-outputs", "--use-v2-block-manager", "--swap-space",
         "--preemption-mode", "--scheduler-delay-factor", "--num-lookahead-slots", "--disable-async-output-proc",
         "--worker-use-ray", "--engine-use-ray", "--max-num-partial-prefills", "--calculate-kv-scales",
         "--disable-frontend-multiprocessing", "--quantization-param-path", "--enable-lora-bias"), DROP_HINT,
    ),
}  # fmt: skip
"""Options of earlier releases that scripts may still have. An installed release that has such an option accepts it."""
OLD_FIELDS = {
    "full_cuda_graph": 'cudagraph_mode, for example "FULL"', "use_cudagraph": 'cudagraph_mode, "NONE" without graphs',
    "level": "mode", "use_inductor": 'backend, "inductor" or "eager"',
    "enable_fusion": "fuse_norm_quant", "enable_attn_fusion": "fuse_attn_quant", "enable_noop": "eliminate_noops",
    "enable_fi_allreduce_fusion": "fuse_allreduce_rms",
}  # fmt: skip
"""Fields of --compilation-config and its pass_config in earlier releases, with their replacements."""
OLD_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "it is now --attention-backend",
    "VLLM_ALL2ALL_BACKEND": "it is now --all2all-backend",
    "VLLM_MM_ENCODER_ATTN_BACKEND": "it is now --mm-encoder-attn-backend",
    "VLLM_TORCH_PROFILER_DIR": "it is now torch_profiler_dir in --profiler-config",
    "VLLM_MORIIO_CONNECTOR_READ_MODE": "it is now read_mode in kv_connector_extra_config",
    **dict.fromkeys(("VLLM_USE_V1", "VLLM_USE_TRITON_FLASH_ATTN", "VLLM_ROCM_USE_AITER_PAGED_ATTN"), "drop it"),
}  # fmt: skip
"""Environment variables of earlier releases, with hints."""
MIN_VARIABLE_SIMILARITY = 0.85
MIN_RELEASE_OF_DISABLE = (0, 33)
"""The first release in which ``--disable-X`` is the opposite of ``--enable-X``."""


def check_names(words: Sequence[str], command_options: Iterable[str] = ()) -> None:
    """Check the names of the options in ``words``, which follow MODEL, up to "--". Without vLLM do nothing.

    ``command_options`` are the options of the command itself.

    Raises:
        ValueError: an option belongs neither to vLLM nor to the command, and is in ``OLD_OPTIONS`` or is similar to an
            existing option. The message names both.
    """
    before_end = words[: words.index("--")] if "--" in words else words
    long_options = [word for word in before_end if word.startswith("--")]
    # Without vLLM's names each of its options would look like a misspelt option of the command.
    if not long_options or not vllm_option_names():
        return
    own_names = frozenset(command_options)
    valid_names = {*vllm_option_names(), *own_names}
    for word in long_options:
        option_as_typed = word.partition("=")[0]
        option = option_as_typed.partition(".")[0].replace("_", "-")
        if "_" in option_as_typed and option in own_names - vllm_option_names():  # only vLLM takes underscores
            raise ValueError(f"{option_as_typed}: no such option; did you mean {option}?")
        if not re.match(r"--[a-z]", option) or any(name.startswith(option) for name in valid_names):
            continue
        is_opposite = any(
            option.startswith(opposite) and prefix + option.removeprefix(opposite) in valid_names
            for opposite, prefix in OPPOSITE_PREFIXES
        )
        if option in OLD_OPTIONS and not (is_opposite and _vllm_release() >= MIN_RELEASE_OF_DISABLE):
            raise ValueError(f"{option_as_typed}: no such option: {OLD_OPTIONS[option]}")
        if is_opposite:
            continue
        candidates = sorted(_options_of_same_polarity(option, valid_names))
        if similar := get_close_matches(option, candidates, 1, MIN_SIMILARITY):
            raise ValueError(f"{option_as_typed}: no such option; did you mean {similar[0]}?")


class TypedOption(NamedTuple):
    """An option among words as typed."""

    position: int  # of its word
    num_words: int  # 1 if the value is behind "=", else 2
    value: str  # "" if the words end before it


def last_typed(names: Sequence[str], words: Sequence[str]) -> TypedOption | None:
    """Return the last option of these names, which is the one that counts in vLLM; None if there is none."""
    for index, word in reversed([*enumerate(words)]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            value = value if equals else next(iter(words[index + 1 : index + 2]), "")
            return TypedOption(index, 1 if equals else 2, value)
    return None


def _options_of_same_polarity(option: str, valid_names: Iterable[str]) -> set[str]:
    """Return the options of the same polarity: those that switch something off, or those that do not."""
    opposites = {
        opposite + name.removeprefix(prefix)
        for name in valid_names
        for opposite, prefix in OPPOSITE_PREFIXES
        if name.startswith(prefix)
    }
    return {
        name
        for name in {*valid_names, *opposites} - OLD_OPTIONS.keys()
        if name.startswith(OFF_PREFIXES) == option.startswith(OFF_PREFIXES)
    }


@cache
def vllm_option_names() -> frozenset[str]:
    """Return the names of vLLM's options, and a few other words. The set is empty if vLLM is not installed.

    They are the literals in vLLM's sources that begin with a dash, and the fields of classes.
    """
    folder, names = _vllm_folder(), set[str]()
    if folder is None:
        return frozenset()
    for path in (path for pattern in SOURCE_PATTERNS for path in folder.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", text))
        names.update("--" + field.replace("_", "-") for field in re.findall(r"^    ([a-z]\w*):", text, re.MULTILINE))
    return frozenset(names)


def _vllm_folder() -> Path | None:
    """Return the folder of the installed vLLM without importing it, or None if it is not installed."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _vllm_release() -> tuple[int, ...]:
    """Return the first two numbers of the installed vLLM's release. If they cannot be read, return a high one."""
    folder, text = _vllm_folder(), ""
    if folder is not None:
        with suppress(OSError):  # only built sources have this file
            text = (folder / "_version.py").read_text(encoding="utf-8")
    version = re.search(r"version = ['\"](\d+)\.(\d+)", text)
    return tuple(map(int, version.groups())) if version else (2**9,)


def renamed_field_hints(message: str) -> str:
    """Return the end of a message of pydantic that rejects fields of an earlier release: their replacements."""
    fields = re.findall(r"(\w+):? (?:Unexpected keyword argument|Extra inputs are not permitted)", message)
    return "".join(f"; {field} is now {OLD_FIELDS[field]}" for field in fields if field in OLD_FIELDS)
