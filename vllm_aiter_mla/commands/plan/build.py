"""Join everything into one plan: plain containers, for ``--json`` and for the page alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from vllm_aiter_mla import __version__, admission
from vllm_aiter_mla.admission import Skip, integration_of, why_not_passes
from vllm_aiter_mla.commands.plan import formulas, kernels, outcome
from vllm_aiter_mla.commands.plan.model import Source
from vllm_aiter_mla.compat.switches import FP4_BMM, FP8_BMM, USE_AITER, VARIABLES
from vllm_aiter_mla.kernels import vllm_own
from vllm_aiter_mla.settings import FLAG_FIELD, DebugSettings, Settings

OPTIONS = ("tp", "pp", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_drafts")
VIEWED = ("dcp", "pcp", "enforce_eager", "mode")


def build(
    source: Source, answer: dict[str, Any], about: dict[str, Any], variables: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return the plan. Kernels and figures are those of the most frequent kind of layer.

    Args:
        source: the model's config.
        answer: of vLLM, with ``model`` in it; without ``engine`` vLLM refuses to start.
        about: the card, vLLM's version and its switches.
        variables: value and origin of each variable that is set.
    """
    given = answer["given"]["settings"]
    settings = Settings(**given | {"debug": DebugSettings(**given["debug"])})
    model, engine, layers = answer["model"], answer.get("engine"), answer.get("layers", [])
    against = outcome.engine_reasons(answer)
    limit = _limit(engine, settings) if engine else 0
    kinds = [_Planned(about["arch"], settings, engine, layer, limit) for layer in layers] if engine else []
    main = kinds[0] if kinds else None
    total = sum(layer["count"] for layer in layers) or model["listed_layers"]
    engaged = 0 if against else sum(kind.count for kind in kinds if not kind.reasons)
    reasons = _once([*against, *(reason for kind in kinds for reason in kind.told(total))])
    forms: Counter[str] = Counter()
    for kind in kinds:
        forms[kind.form] += kind.count
    return {
        "plugin": __version__,
        "vllm": about["vllm"],
        "model": _model(source, answer),
        "arch": about["arch"],
        "options": _options(answer, settings),
        "environment": {name: variables.get(name, (str(int(about["on"][name])), "default")) for name in VARIABLES},
        "heads_per_rank": main.heads if main else 0,
        "absorb_weight": main.form if main else None,
        "absorb_weights": dict(forms),
        "limit": limit,
        **_graph(engine, limit),
        "outcome": outcome.of(reasons, engaged, total),
        "layers": {
            "mla": total,
            "drafts": sum(layer["count"] for layer in layers if layer["draft"]),
            "total": model["layers"],
            "engaged": engaged,
        },
        "reasons": [{"scope": outcome.level(reason.code), **asdict(reason)} for reason in reasons],
        "kernels": [asdict(span) for span in main.spans] if main else None,
        "figures": _figures(answer, main, limit) if main else None,
        "assumptions": _assumptions(answer, about, variables, settings, main),
    }


class _Planned:
    """What is planned for one kind of layer."""

    def __init__(
        self, arch: str, settings: Settings, engine: dict[str, Any], layer: dict[str, Any], limit: int
    ) -> None:
        view = outcome.layer_view(layer)
        self.view, self.form, self.count = view, layer["form"], int(layer["count"])
        self.heads, self.fp8_cache = view.num_heads, view.kv_cache_dtype.startswith("fp8")
        self.reasons = outcome.layer_reasons(layer)
        found = kernels.spans(arch, settings, view, self.form, engine["block_size"], limit)
        self.spans = () if isinstance(found, str) else found
        if isinstance(found, str):
            self.reasons.append(Skip("kernel_unavailable", found))
        elif found[0].skips:
            # The server decides with one row: a back end that does not even take that leaves the layer to vLLM.
            self.reasons.append(Skip("kernel_shape", found[0].skips[0][1]))

    def told(self, total: int) -> list[Skip]:
        """Return the reasons; with their share of the layers where others are of another kind."""
        share = "" if self.count == total else f"{self.count} of {total} layers: "
        return [replace(reason, message=share + reason.message) for reason in self.reasons]


def _limit(engine: dict[str, Any], settings: Settings) -> int:
    """Return the gate's decode limit; where the gate declines, the one that it would have set."""
    if engine["gate"]:
        return int(engine["gate"]["limit"])
    return admission.decode_limit(engine["max_num_seqs"], engine["num_drafts"], settings.max_token_num)


def _once(reasons: list[Skip]) -> list[Skip]:
    """Return each reason once; one of the whole engine is not said again of its layers."""
    found: dict[str, list[Skip]] = {}
    for reason in reasons:
        if reason.code not in found or " layers: " in reason.message:
            found.setdefault(reason.code, []).append(reason)
    return [reason for same in found.values() for reason in same]


def _model(source: Source, answer: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of the model; equal layers are counted, with their heads over all ranks."""
    tp, kinds = (answer.get("engine") or {}).get("tp", 1), []
    for layer in answer.get("layers", []):
        view = layer["view"]
        sizes = {"nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "latent": "kv_lora_rank", "v": "v_head_dim"}
        kinds.append(
            {"count": layer["count"], "heads": view["num_heads"] * tp, "is_sparse": view["is_sparse"]}
            | {name: view[field] for name, field in sizes.items()}
            | {name: layer[name] for name in ("has_rope", "method", "weight")}
        )
    named = {"name": source.name, "source": source.origin, "basis": source.basis, "assumed": source.assumed}
    return named | answer["model"] | {"notes": answer["given"]["notes"], "kinds": kinds}


def _options(answer: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the options as vLLM's finished config has them, None where vLLM refuses to make one."""
    engine = answer.get("engine") or {}
    view = engine.get("view", {})
    return {
        **{name: engine.get(name) for name in OPTIONS},
        **{name: view.get(name) for name in VIEWED},
        "attention_backend": answer["given"]["attention_backend"],
        "dtype": answer["model"]["dtype"],
        "kv_cache_dtype": engine.get("cache_dtype", "not known"),
        "settings": asdict(settings),
    }


def _graph(engine: dict[str, Any] | None, limit: int) -> dict[str, Any]:
    """Return which integration would run, vLLM's compile ranges, and its captured sizes up to and above the limit.

    The first ``inside`` ranges are those that the passes would rewrite. Each range is one more compile of the model.
    """
    if engine is None:
        nothing = {"note": "none: vLLM does not start"}
        empty = {"ranges": (), "inside": 0} | nothing, {"inside": (), "outside": ()} | nothing
        return {"integration": None, "why_not_passes": None, "compile_ranges": empty[0], "captures": empty[1]}
    view, ranges, sizes = outcome.config_view(engine), tuple(map(tuple, engine["ranges"])), engine["captures"]
    cut = why_not_passes(view)
    integration = engine["gate"]["integration"] if engine["gate"] else integration_of(view)
    compiled = view.mode == "VLLM_COMPILE" and not view.enforce_eager
    passes = integration == "passes" and engine["gate"] is not None
    no_graph = "--enforce-eager" if view.enforce_eager else "CUDA graphs are off"
    return {
        "integration": integration,
        "why_not_passes": None if cut is None else asdict(cut),
        "compile_ranges": {
            "ranges": ranges if compiled else (),
            "inside": sum(admission.within_limit(end, limit) for _, end in ranges) if passes and compiled else 0,
            "note": "" if compiled else "none: vLLM compiles no graph with these options",
        },
        "captures": {
            "inside": tuple(size for size in sizes if size <= limit),
            "outside": tuple(size for size in sizes if size > limit),
            "note": "" if sizes else f"none: {no_graph}",
        },
    }


def _figures(answer: dict[str, Any], planned: _Planned, limit: int) -> dict[str, Any]:
    view, stored = planned.view, 1 if planned.fp8_cache else formulas.ACT
    table: dict[int, dict[str, Any]] = {}
    for tokens in sorted({1, min(64, limit), limit}):
        step = formulas.Step(
            tokens, planned.heads, view.qk_nope_head_dim, view.qk_rope_head_dim, view.kv_lora_rank, stored,
            formulas.WEIGHT[planned.form],
        )  # fmt: skip
        paths = {name: path(step) for name, path in formulas.PATHS.items()}
        table[tokens] = {
            name: {
                "launches": [asdict(launch) for launch in launches],
                "launches_per_step": len(launches) * planned.count,
                "bytes": formulas.moved(launches),
            }
            for name, launches in paths.items()
        }
    return {
        "layers": planned.count,
        "by_tokens": table,
        # Of the largest prepared query up to the limit; layers run one after the other, so one of them is alive.
        "q_prepared_bytes": limit * planned.heads * (view.kv_lora_rank + view.qk_rope_head_dim) * stored,
        # The contiguous cos and sin that the AITER path keeps, once per rotary table and rank.
        "table_halves_bytes": answer["model"]["max_position"] * view.qk_rope_head_dim * formulas.ACT,
    }


def _assumptions(
    answer: dict[str, Any],
    about: dict[str, Any],
    variables: Mapping[str, tuple[str, str]],
    settings: Settings,
    main: _Planned | None,
) -> list[str]:
    """Return what vLLM took by default, and what it would take from a card that is not here, as sentences."""
    arch, notes = about["arch"], []
    if about["made_up"]:
        notes.append(f"this machine has no ROCm: vLLM ran with a driver, cards and libraries made up for {arch}")
    notes += _defaults(answer, about, variables)
    if not settings.enabled:
        notes.append(f"pass_config.{FLAG_FIELD} is not given: planned as if it were true")
    notes.append("ROCm 7 or newer, an AITER with the 15-argument op: `vllm-aiter-mla doctor` looks at the machine")
    if settings.measures:
        notes.append(
            "kernel=auto: the server times aiter, triton and unmodified vLLM on its card; shown is the order without it"
        )
    if main and vllm_own.may_take_parts(arch, main.heads, main.fp8_cache):
        notes.append(
            f"vLLM may decode {main.heads} heads by Gluon (a layer's cache up to 2 GiB), which needs no concat: vLLM "
            "then has a launch less than the figures say"
        )
    engine = answer.get("engine")
    if engine and integration_of(outcome.config_view(engine)) == "module":
        notes.append(
            "the module integration asks each layer's wrapper and rotary embedding after loading; plan does not"
        )
    if engine and engine["pp"] > 1:
        notes.append(f"figures are for all layers; with --pipeline-parallel-size {engine['pp']} a rank holds its share")
    return [*notes, *answer["given"]["notes"]]


def _defaults(answer: dict[str, Any], about: dict[str, Any], variables: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield a sentence for each option and variable that is not given and has a default of the installed vLLM."""
    arch, release = about["arch"], about["vllm"]
    batch = {"max_num_seqs": f"the API server's default in vLLM {release} on {arch}",
             "max_num_batched_tokens": "that server's default"}  # fmt: skip
    for name, whose in batch.items():
        if "engine" in answer and answer["given"][name] is None:
            yield f"--{name.replace('_', '-')} is not given: {answer['engine'][name]}, {whose}"
    if variables[USE_AITER][1] == "default":
        yield f"{USE_AITER}=1 is assumed; vLLM's default is 0: export it"
    # The fp4 switch acts on gfx950 only, and only where kv_b_proj is in bfloat16.
    bf16 = any(layer["weight"] == "bfloat16" for layer in answer.get("layers", []))
    for name in (FP8_BMM, FP4_BMM) if arch == "gfx950" and bf16 else (FP8_BMM,):
        if name not in variables:
            state, other, value = ("on", "without", 0) if about["on"][name] else ("off", "with", 1)
            yield f"{name} is unset: {state}, the default of vLLM {release}; plan {other} it by --env {name}={value}"
