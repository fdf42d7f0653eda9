"""What the user sees after warm-up: one line on rank 0, and a JSON file per run and rank."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_aiter_mla.compat import log
from vllm_aiter_mla.report import census, gauge
from vllm_aiter_mla.settings import SettingsError


def after_warm_up(
    *,
    total: Sequence[str],
    limit: int,
    kv_cache_dtype: str,
    strict: bool,
    rank: int,
    key: str,
    capture_sizes: Sequence[int] = (),
) -> None:
    """Complete the census, write it down, and say the verdict once.

    Args:
        total: names of the model's MLA layers.
        limit: L of the decode bucket.
        kv_cache_dtype: of the engine, as vLLM spells it.
        strict: whether zero engaged layers is an error.
        rank: of this worker; rank 0 speaks.
        key: identifies the configuration: refusals noted when its graphs were compiled serve later warm starts.
        capture_sizes: token counts of the captured graphs, for the report.

    Raises:
        SettingsError: strict mode, and no layer engaged.
    """
    folder = cache_folder()
    _complete(folder / f"refusals-{key[:16]}-{rank}.json")
    record = as_record(total, limit, kv_cache_dtype, rank) | {"capture_sizes": list(capture_sizes)}
    gauge.publish(record)
    _write(folder / f"census-{os.getpid()}-{rank}.json", record)
    if rank == 0:
        _say(record, strict)


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
    _write(cache_folder() / f"census-{os.getpid()}-0.json", record)


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
    if record["partial"]:
        return ": ".join(next(iter(record["partial"].values())))
    if not record["refused"]:
        return "the model has no MLA layer"
    return ": ".join(next(iter(record["refused"].values())))


def _say(record: dict[str, Any], strict: bool) -> None:
    text = line(record)
    if strict and not record["engaged"]:
        raise SettingsError(f"{log.PREFIX}{text} (additional_config.aiter_mla.strict=true)")
    # Every engine of a process has its verdict said, also one that reads like the last.
    log.say(logging.INFO if record["engaged"] else logging.WARNING, text)


def _complete(path: Path) -> None:
    """Keep the refusals of a cold start for the warm starts that load its artifact; read them on such a start."""
    now = census.current()
    if now.compiled:
        _write(path, {"refused": now.refused, "partial": now.partial})
    elif path.is_file():
        try:
            known = json.loads(path.read_text())
            refused = {name: tuple(why) for name, why in known["refused"].items()}
            partial = {name: tuple(why) for name, why in known["partial"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            # Half a file of a process that was killed: the verdict then goes without the reasons.
            log.say_once(logging.DEBUG, f"{path} is not readable and left aside: {type(error).__name__}: {error}")
            return
        now.refused.update(refused)
        now.partial.update(partial)


def _write(path: Path, record: dict[str, Any]) -> None:
    # Replaced in one step: data-parallel replicas write the same refusals, and a reader must never see half of them.
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(record, indent=1))
        new.replace(path)
    except OSError as error:
        log.say_once(logging.WARNING, f"the census could not be written to {path}: {error}")
