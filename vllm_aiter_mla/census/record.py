"""What the user sees after warm-up: one line on rank 0, and a JSON file per run and rank."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_aiter_mla.census import state as census
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat.patches import gauge
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError

LARGEST = 2**22
"""Bytes of a refusals file that are read; 61 layers with a reason each take some 10 kB."""


def say(record: dict[str, Any], strict: bool) -> None:
    """Say the verdict; rank 0 speaks for all, and every rank that holds MLA layers keeps strict mode's promise.

    Args:
        record: of ``as_record``.
        strict: whether zero engaged layers is an error.

    Raises:
        SettingsError: strict mode, and no layer engaged.
    """
    is_first, text = record["rank"] == 0, line(record)
    if strict and not record["engaged"] and (is_first or record["total"]):
        raise SettingsError(f"{log.PREFIX}{text} ({STRICT_OPTION})")
    if is_first:
        # Every engine of a process has its verdict said, also one that reads like the last.
        log.say(logging.INFO if record["engaged"] else logging.WARNING, text)


def write_down(
    record: dict[str, Any], *, key: Callable[[], str], capture_sizes: Callable[[], Sequence[int]] = lambda: ()
) -> None:
    """Write the census to its file and for the gauge. Never raises: a file costs a warning, never the verdict.

    Args:
        record: of ``as_record``; gains the refusals of the start that compiled these graphs, and the captured sizes.
        key: gives what identifies the configuration: refusals noted when its graphs were compiled serve warm starts.
        capture_sizes: gives the token counts of the captured graphs.
    """
    rank = record["rank"]
    doing = "written" if census.current().compiled else "read"
    _try(
        f"the refusals could not be {doing}",
        lambda: _keep_refusals(record, cache_folder() / f"refusals-{key()[:16]}-{rank}.json"),
    )
    record["capture_sizes"] = []
    _try("the captured sizes could not be read", lambda: record.update(capture_sizes=list(capture_sizes())))
    gauge.publish(record)
    _try(
        "the census could not be written", lambda: _write(cache_folder() / f"census-{os.getpid()}-{rank}.json", record)
    )


def declined(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> None:
    """Write down that the whole engine was declined: the file and the gauge say so as the log does.

    Nothing of ours runs in the workers then, so the process that built the config speaks for all ranks.

    Args:
        code: the refusal's code.
        message: its line.
        layers: indices of the model's MLA layers; their names are known to the workers alone.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    record = {
        "rank": 0,
        "total": len(layers),
        "engaged": {},
        "refused": {f"layer {index}": [code, message] for index in layers},
        "partial": {},
        "compiled": {},
        "decode_bucket": [],
        "capture_sizes": [],
        "kv_cache_dtype": kv_cache_dtype,
    }
    gauge.install()
    gauge.publish(record, declined=True)
    _try("the census could not be written", lambda: _write(cache_folder() / f"census-{os.getpid()}-0.json", record))


def cache_folder() -> Path:
    """Where the plugin keeps its files: under vLLM's own cache root."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "aiter_mla"


def as_record(total: Sequence[str], limit: int, kv_cache_dtype: str, rank: int) -> dict[str, Any]:
    """The census as plain containers; a layer without a verdict counts as refused."""
    now = census.current()
    refused = {name: list(now.refused.get(name, ("not_run", "its fused op has not run"))) for name in total}
    return {
        "rank": rank,
        "total": len(total),
        "engaged": {name: now.engaged[name] for name in total if name in now.engaged},
        "refused": {name: why for name, why in refused.items() if name not in now.engaged},
        "partial": {name: list(why) for name, why in now.partial.items()},
        "compiled": now.compiled,
        "decode_bucket": [1, limit],
        "kv_cache_dtype": kv_cache_dtype,
    }


def line(record: dict[str, Any]) -> str:
    """The verdict in one line."""
    engaged, total = record["engaged"], record["total"]
    if not engaged:
        return f"0/{total}: {_first_reason(record)} (run: vllm-aiter-mla doctor)"
    kernels = "+".join(sorted(set(engaged.values())))
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(record["kv_cache_dtype"], "fp8")
    low, high = record["decode_bucket"]
    text = f"{len(engaged)}/{total} MLA layers engaged ({kernels}, {cache} KV, decode bucket {low}..{high})"
    return text if len(engaged) == total else f"{text}; {total - len(engaged)} refused: {_first_reason(record)}"


def _first_reason(record: dict[str, Any]) -> str:
    reasons = record["partial"] or record["refused"]
    if not reasons:
        return "the model has no MLA layer"
    text = ": ".join(next(iter(reasons.values())))
    # It may come from a file: one line, without what would drive a terminal.
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _keep_refusals(record: dict[str, Any], path: Path) -> None:
    """Keep the refusals of a cold start for the warm starts that load its artifact; read them on such a start."""
    now = census.current()
    if now.compiled:
        _write(path, {"refused": now.refused, "partial": now.partial})
        return
    try:
        known = _read_refusals(path)
    except FileNotFoundError:
        return
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    record["partial"] |= {name: why for name, why in known["partial"].items() if name in record["refused"]}
    record["refused"] |= {name: why for name, why in known["refused"].items() if name in record["refused"]}
    if record["rank"] == 0 and record["refused"] and (known["refused"] or known["partial"]):
        log.say(logging.INFO, f"noted when these graphs were compiled: {_first_reason(record)}")


def _read_refusals(path: Path) -> dict[str, dict[str, list[str]]]:
    """What a cold start wrote: {"refused": {layer: [code, reason]}, "partial": the same}.

    Raises:
        FileNotFoundError: there is none.
        Exception: it cannot be read, is larger than ``LARGEST`` bytes, or does not hold that.
    """
    # Not followed, and not waited for: a pipe in its place would block for ever.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"larger than {LARGEST} bytes")
    known = json.loads(text)
    tables = {kind: known[kind] for kind in ("refused", "partial")}
    for table in tables.values():
        for why in dict.values(table):
            if not isinstance(why, list) or [type(part) for part in why] != [str, str]:
                raise TypeError(f"[code, reason] expected, not {why!r:.60}")
    return tables


def _try(what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        log.say_once(logging.WARNING, f"{what}: {type(error).__name__}: {error}")


def _write(path: Path, record: dict[str, Any]) -> None:
    # Replaced in one step: data-parallel replicas write the same refusals, and a reader must never see half of them.
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(json.dumps(record, indent=1))
    new.replace(path)
