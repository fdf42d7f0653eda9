"""A model as ``plan`` sees it: the few fields of its Hugging Face config that decide, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_aiter_mla.commands.plan import fields
from vllm_aiter_mla.commands.plan.fields import WIDTH, whole

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
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES.glob("*.json")}
    return dict(sorted(found.items()))


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
    """The facts in a Hugging Face config; those of the text model where it holds several.

    Raises:
        ValueError: a field that is needed is missing, or of a wrong type or size; names it.
    """
    try:
        return ModelFacts(name=name, source=source, basis=basis, assumed=assumed, **_fields(config))
    except fields.FieldError as error:
        raise ValueError(f"{name} ({source}): {error}") from error


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    text = fields.mapping(config, "text_config") or config
    is_mla = text.get("kv_lora_rank") is not None and text.get("is_causal", True) is not False
    for key in ("num_hidden_layers", *(["num_attention_heads"] if is_mla else [])):
        if text.get(key) is None:
            raise fields.FieldError(f"no {key}: not a model config")
    quantisation = fields.mapping(text, "quantization_config") or fields.mapping(config, "quantization_config")
    return {
        "model_type": str(text.get("model_type", "")),
        "is_mla": is_mla,
        "is_sparse": text.get("index_topk") is not None,
        "is_nope": bool(text.get("mla_use_nope")) or text.get("qk_rope_head_dim") == 0,
        "dtype": _dtype(text, config),
        "kv_b_quantised": _kv_b_quantised(quantisation),
        "hidden_size": whole(text, "hidden_size"),
        "layers": whole(text, "num_hidden_layers", WIDTH, least=1),
        "mla_layers": mla_layers(text),
        "heads": whole(text, "num_attention_heads", WIDTH, least=1),
        "nope": whole(text, "qk_nope_head_dim", WIDTH),
        "rope": whole(text, "qk_rope_head_dim", WIDTH),
        "latent": whole(text, "kv_lora_rank", WIDTH),
        "v": whole(text, "v_head_dim", WIDTH),
        "max_position": whole(text, "max_position_embeddings"),
        "draft_layers": whole(text, "num_nextn_predict_layers", WIDTH),
    }


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for place, key in ((text, "dtype"), (text, "torch_dtype"), (config, "dtype"), (config, "torch_dtype")):
        if place.get(key) is not None:
            return fields.dtype(place[key], key)
    return "bfloat16"


def _from_example(name: str, entry: dict[str, Any]) -> ModelFacts:
    about = entry["example"]
    return facts(name, entry["config"], "bundled example", about["basis"], tuple(about["assumed"]))


def _local_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        found = next((candidate for candidate in (path / "config.json", path) if candidate.is_file()), None)
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return None
    if found is not None:
        return found
    if is_folder:
        raise ModelNotFoundError(f"{name} is a folder without a config.json")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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


def mla_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of a text config's MLA layers: all, or, in a hybrid with linear attention, those that it lists from 1.

    Raises:
        FieldError: the number of layers or their list is wrong.
    """
    if text.get("kv_lora_rank") is None:
        return ()
    layers = whole(text, "num_hidden_layers", WIDTH, least=1)
    listed = fields.layer_numbers(fields.mapping(text, "linear_attn_config"), "full_attn_layers")
    # A shortened model keeps the list of the whole one.
    return tuple(range(layers)) if listed is None else tuple(index - 1 for index in listed if index <= layers)


def _kv_b_quantised(quantisation: Mapping[str, Any]) -> bool:
    left_out = [*fields.names(quantisation, "ignore"), *fields.names(quantisation, "modules_to_not_convert")]
    left_out += fields.names(quantisation, "exclude")  # AMD's Quark
    return bool(quantisation) and not any("self_attn" in name or "kv_b_proj" in name for name in left_out)
