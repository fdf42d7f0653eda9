"""A model as ``plan`` sees it: the few fields of its Hugging Face config that decide, and where they come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent / "models"


class ModelNotFoundError(LookupError):
    """No config for the name that was given; the message says what can be given instead."""


@dataclass(frozen=True)
class ModelFacts:
    """What is planned with.

    Attributes:
        name: as the user gave it.
        source: where the config was read.
        basis: for a bundled example, what its fields rest on; else empty.
        assumed: for a bundled example, what is assumed in it.
        model_type: of the text model.
        is_mla: whether vLLM runs it with MLA.
        is_sparse: whether an indexer picks the KV rows.
        is_nope: whether its MLA layers have no rotary embedding.
        dtype: activation dtype of the checkpoint.
        kv_b_quantised: whether ``kv_b_proj``, from which the absorb matrix is made, is quantised.
        hidden_size: width of the residual stream.
        layers: number of decoder layers.
        mla_layers: indices, from 0, of those with MLA.
        heads: query heads over all ranks.
        nope, rope, latent, v: P, R, L and V of the layers.
        max_position: rows of the rotary table.
        draft_layers: multi-token-prediction layers in the checkpoint.
    """

    name: str
    source: str
    basis: str
    assumed: tuple[str, ...]
    model_type: str
    is_mla: bool
    is_sparse: bool
    is_nope: bool
    dtype: str
    kv_b_quantised: bool
    hidden_size: int
    layers: int
    mla_layers: tuple[int, ...]
    heads: int
    nope: int
    rope: int
    latent: int
    v: int
    max_position: int
    draft_layers: int


def examples() -> dict[str, dict[str, Any]]:
    """The bundled examples by name, each with ``example`` (what it rests on) and ``config``."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(EXAMPLES.glob("*.json"), key=_stem)
    }


def load(name: str) -> ModelFacts:
    """Read the config of ``name``: a folder or file, a bundled example, or a hub name in the local cache.

    Raises:
        ModelNotFoundError: none of them; nothing is downloaded.
        ValueError: the file is not a config.
    """
    local = _local_file(name)
    if local is not None:
        return facts(name, _read(local), f"file {local}")
    bundled = examples()
    if name.lower() in bundled:
        return _from_example(name, bundled[name.lower()])
    cached = _cached(name)
    if cached is not None:
        return facts(name, _read(cached), "local Hugging Face cache")
    for entry in bundled.values():
        if entry["example"]["hub_name"].lower() == name.lower():
            return _from_example(name, entry)
    raise ModelNotFoundError(
        f"{name}: no such folder or file, no bundled example of that name, and not in the local Hugging Face cache; "
        f"plan downloads nothing. Give the path of a config.json, or one of: {', '.join(bundled)}"
    )


def facts(name: str, config: dict[str, Any], source: str, basis: str = "", assumed: tuple[str, ...] = ()) -> ModelFacts:
    """The facts in a Hugging Face config; those of the text model where it holds several."""
    text = config.get("text_config") or config
    layers = _int(text, "num_hidden_layers")
    return ModelFacts(
        name=name,
        source=source,
        basis=basis,
        assumed=assumed,
        model_type=str(text.get("model_type", "")),
        is_mla=text.get("kv_lora_rank") is not None and text.get("is_causal", True) is not False,
        is_sparse=text.get("index_topk") is not None,
        is_nope=bool(text.get("mla_use_nope")) or text.get("qk_rope_head_dim") == 0,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"),
        kv_b_quantised=_kv_b_quantised(text.get("quantization_config") or config.get("quantization_config")),
        hidden_size=_int(text, "hidden_size"),
        layers=layers,
        mla_layers=mla_layers(text),
        heads=_int(text, "num_attention_heads"),
        nope=_int(text, "qk_nope_head_dim"),
        rope=_int(text, "qk_rope_head_dim"),
        latent=_int(text, "kv_lora_rank"),
        v=_int(text, "v_head_dim"),
        max_position=_int(text, "max_position_embeddings"),
        draft_layers=_int(text, "num_nextn_predict_layers"),
    )


def _stem(path: Path) -> str:
    return path.stem


def _from_example(name: str, entry: dict[str, Any]) -> ModelFacts:
    about = entry["example"]
    return facts(name, entry["config"], "bundled example", about["basis"], tuple(about["assumed"]))


def _local_file(name: str) -> Path | None:
    path = Path(name).expanduser()
    for candidate in (path / "config.json", path):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise ModelNotFoundError(f"{name} is a folder without a config.json")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable config: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a readable config: a JSON object expected")
    return config


def _cached(name: str) -> Path | None:
    """The config of a hub name that an earlier download left in the local cache."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except Exception:  # absent, or the name is not a repository name
        return None
    return Path(found) if isinstance(found, str) else None


def _int(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def mla_layers(text: dict[str, Any]) -> tuple[int, ...]:
    """Indices of a text config's MLA layers: all, or, in a hybrid with linear attention, those that it lists from 1."""
    if text.get("kv_lora_rank") is None:
        return ()
    hybrid = text.get("linear_attn_config") or {}
    listed = hybrid.get("full_attn_layers")
    return tuple(range(_int(text, "num_hidden_layers"))) if listed is None else tuple(index - 1 for index in listed)


def _kv_b_quantised(quantisation: dict[str, Any] | None) -> bool:
    if not quantisation:
        return False
    left_out = [*(quantisation.get("ignore") or ()), *(quantisation.get("modules_to_not_convert") or ())]
    return not any("self_attn" in name or "kv_b_proj" in name for name in left_out)
