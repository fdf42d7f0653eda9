# SPDX-License-Identifier: Apache-2.0
"""Options of ``vllm serve`` by their names, read from vLLM's sources: a misspelt one ends a command at once.

vLLM's own parser has the last word. Importing it takes ten seconds.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
OPPOSITES = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"))
"""Prefixes by which vLLM's parser makes the opposite of a switch; the last two from 0.33 on."""
OFF = ("--no-", "--disable-")
SIMILAR = 0.75
"""Least likeness of two names, as difflib counts it. An option that is like no other is left to vLLM's parser."""
DROP = "vLLM no longer has it, drop it"
GONE = {
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
         "--disable-frontend-multiprocessing", "--quantization-param-path", "--enable-lora-bias"), DROP,
    ),
}  # fmt: skip
"""Options of earlier releases, which scripts still have. A release that has one of them takes it."""
GONE_FIELDS = {
    "full_cuda_graph": "cudagraph_mode", "use_cudagraph": "cudagraph_mode", "level": "mode", "use_inductor": "mode",
    "enable_fusion": "fuse_norm_quant", "enable_attn_fusion": "fuse_attn_quant", "enable_noop": "eliminate_noops",
    "enable_fi_allreduce_fusion": "fuse_allreduce_rms",
}  # fmt: skip
"""Fields of --compilation-config and its pass_config in earlier releases, by what replaces them."""
GONE_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "it is now --attention-backend",
    "VLLM_ALL2ALL_BACKEND": "it is now --all2all-backend",
    "VLLM_MM_ENCODER_ATTN_BACKEND": "it is now --mm-encoder-attn-backend",
    "VLLM_TORCH_PROFILER_DIR": "it is now torch_profiler_dir in --profiler-config",
    "VLLM_MORIIO_CONNECTOR_READ_MODE": "it is now read_mode in kv_connector_extra_config",
    **dict.fromkeys(("VLLM_USE_V1", "VLLM_USE_TRITON_FLASH_ATTN", "VLLM_ROCM_USE_AITER_PAGED_ATTN"), "drop it"),
}  # fmt: skip
"""Variables of earlier releases."""
SIMILAR_VARIABLE = 0.85
TURNED_BY_DISABLE = (0, 33)
"""The release from which ``--disable-X`` is the opposite of ``--enable-X``."""


def check(words: Sequence[str], own: Iterable[str] = ()) -> None:
    """Check the names of the options among the words after MODEL, up to "--"; ``own`` are the command's own options.

    Raises:
        ValueError: an option is neither vLLM's nor the command's, and is one of ``GONE`` or looks like one that there
            is; names both. Nothing is said where vLLM is not installed.
    """
    before_end = words[: words.index("--")] if "--" in words else words
    long_options = [word for word in before_end if word.startswith("--")]
    if not long_options or not names():  # without vLLM each of its options would look like one of the command's own
        return
    known = {*names(), *own}
    for word in long_options:
        typed = word.partition("=")[0]
        option = typed.partition(".")[0].replace("_", "-")
        if not re.match(r"--[a-z]", option) or any(name.startswith(option) for name in known):
            continue
        is_opposite = any(option.startswith(to) and of + option.removeprefix(to) in known for to, of in OPPOSITES)
        if option in GONE and not (is_opposite and _release() >= TURNED_BY_DISABLE):
            raise ValueError(f"{typed}: no such option: {GONE[option]}")
        if is_opposite:
            continue
        if similar := get_close_matches(option, sorted(_of_the_same_kind(option, known)), 1, SIMILAR):
            raise ValueError(f"{typed}: no such option; did you mean {similar[0]}?")


def _of_the_same_kind(option: str, known: Iterable[str]) -> set[str]:
    """Return the options that switch something off if ``option`` does, and else the others."""
    opposites = {to + name.removeprefix(of) for name in known for to, of in OPPOSITES if name.startswith(of)}
    return {name for name in {*known, *opposites} - GONE.keys() if name.startswith(OFF) == option.startswith(OFF)}


@cache
def names() -> frozenset[str]:
    """Return the names of vLLM's options, and some more: each literal of its sources that begins with a dash, and
    each field of a class. The set is empty where vLLM is not installed.
    """
    root, names = _sources(), set[str]()
    if root is None:
        return frozenset()
    for path in (path for pattern in SOURCES for path in root.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", text))
        names.update("--" + field.replace("_", "-") for field in re.findall(r"^    ([a-z]\w*):", text, re.MULTILINE))
    return frozenset(names)


def _sources() -> Path | None:
    """Return the folder of the installed vLLM, without importing it; None if it is not installed."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _release() -> tuple[int, ...]:
    """Return the first two numbers of the installed vLLM's release; a high one where they cannot be read."""
    root, text = _sources(), ""
    if root is not None:
        with suppress(OSError):  # sources that nobody has built have no such file
            text = (root / "_version.py").read_text(encoding="utf-8")
    version = re.search(r"version = ['\"](\d+)\.(\d+)", text)
    return tuple(map(int, version.groups())) if version else (2**9,)


def renamed_fields(message: str) -> str:
    """Return an end for a message of pydantic's: what replaces the fields of an earlier release that it refuses."""
    fields = re.findall(r"(\w+):? (?:Unexpected keyword argument|Extra inputs are not permitted)", message)
    return "".join(f"; {field} is now {GONE_FIELDS[field]}" for field in fields if field in GONE_FIELDS)
