"""What one engine run of the sandbox is, and what it gives back: plain records that travel in files."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_aiter_mla.commands.check.engine import Side
from vllm_aiter_mla.commands.compat.engine import Step

LIMIT_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine start in its own process.

    Attributes:
        side: "plugin" with the flag on; "control" with it off and the options that the gate would add; "today" with it
            off and nothing added.
        scenarios: names from ``scenarios.SCENARIOS``, run one after the other.
        kv_cache_dtype: as vLLM spells it.
        rounding: of the reference kernel: "single" is AITER's, "two" is vLLM's own.
        kernel: the plugin's kernel option.
        stop_after: leave out the passes after this one.
        vllm_pass: switch vLLM's own RoPE + KV pass on.
        tensor_parallel_size: number of workers; above one they are spawned.
        drafts: tokens that the model's own draft layer proposes per step (MTP); above zero the model has one.
        max_num_seqs: requests at a time: the decode limit.
        max_num_batched_tokens: token budget of a step; below a prompt's length the prompt is chunked (bf16 cache).
        model: overrides of ``TinyDeepseek``.
        config: another model's ``config.json`` in place of it; its weights are drawn: see ``random_weights``.
        draft_config: ``config.json`` of an EAGLE-3 draft for ``config``; without it the model's own layer drafts.
        llm: further options of ``vllm.LLM``; they win over the sandbox's.
        lora: every second request goes through a LoRA adapter of random weights.
        shares_kv: write KV rows through vLLM's example connector into a folder of the cache root, and read them there.
        reload: afterwards load the weights of this other seed and run the scenarios again, as "NAME, reloaded".
        compilation: overrides of ``compilation_config``.
        additional: overrides of the plugin's ``additional_config`` mapping.
        linear: "onednn" is the CPU build's out-variant GEMM, "aten" a plain one, as on GPUs.
        scales: (k_scale, q_scale) put into every layer after loading, or None.
        graphs: emulate CUDA graphs: None for no graphs; "none" or "decode" for piecewise graphs captured with no
            metadata or with a decode batch's; "full" for what vLLM does by default: full graphs for decode batches,
            piecewise ones for the others. In one process.
        mutation: "module:function" that plants a bug in the engine's process; tests only.
        dump_graphs: return the post-grad FX graph text by range.
        fake_arch: let the platform look like this AMD card over the simulated AITER.
        attention: "sandbox" for the sandbox's back end, "aiter" for vLLM's own over ``fake_arch``.
        fp8_bmm: hold absorbed weights in fp8, over the simulated AITER.
        fp4_bmm: hold absorbed weights in mxfp4, over the simulated AITER; only on gfx950.
        interpret: run Triton kernels on CPU tensors through Triton's interpreter.
        device: "cpu" for the sandbox's platform; "gpu" for vLLM's own, with its Triton MLA back end.
        spawn: run the engine core in its own process, as vLLM does by default.
        compile_cache: keep vLLM's compile cache on, for warm starts.
        plugin: load the plugin at all.
    """

    side: Side = "plugin"
    scenarios: tuple[str, ...] = ("concurrent",)
    kv_cache_dtype: str = "auto"
    rounding: str = "two"
    kernel: str = "auto"
    stop_after: str | None = None
    vllm_pass: bool = False
    tensor_parallel_size: int = 1
    drafts: int = 0
    max_num_seqs: int = LIMIT_REQUESTS
    max_num_batched_tokens: int = 512
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    draft_config: dict[str, Any] = field(default_factory=dict)
    llm: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    shares_kv: bool = False
    reload: int | None = None
    compilation: dict[str, Any] = field(default_factory=dict)
    additional: dict[str, Any] = field(default_factory=dict)
    linear: str = "onednn"
    scales: tuple[float, float] | None = None
    graphs: str | None = None
    mutation: str | None = None
    dump_graphs: bool = False
    fake_arch: str | None = None
    attention: str = "sandbox"
    fp8_bmm: bool = False
    fp4_bmm: bool = False
    interpret: bool = False
    device: str = "cpu"
    spawn: bool = False
    compile_cache: bool = False
    plugin: bool = True


@dataclass(slots=True)
class EngineResult:
    """What an engine run gave.

    Attributes:
        scenarios: by scenario, the requests' tokens with their log-probabilities.
        status: one record per rank (see ``status.record_of``); empty with the flag off.
        ranges: vLLM's compile ranges as [start, end].
        graphs: post-grad FX graph text by "start-end", where asked for.
        compiled: the options that the gate may change, as the engine had them.
        added: those of them that the gate changed.
        log: the plugin's own log lines.
        versions: of Python, torch and vLLM.
        seconds: from process start to the last token.
        code: what Inductor made of ``graphs``, all pieces of a range in one text.
        compilations: graphs that Inductor compiled, counted where graphs are asked for.
        step_us: median time of an engine step in microseconds; of so small a model, most of it is Python.
        branches: how often the one op prepared decode rows, and how often it rotated in place, by the body's name; of
            this process.
        counters: vLLM's own, by the name of the metric; where ``llm`` sets ``disable_log_stats`` to False.
        pieces: pieces that an emulated piecewise capture would record, of the graph with the most.
        replays: how often an emulated full graph was replayed, by its real rows and all of its rows.
    """

    scenarios: dict[str, list[list[Step]]]
    status: list[dict[str, Any]]
    ranges: list[tuple[int, int]]
    graphs: dict[str, str]
    compiled: dict[str, Any]
    added: dict[str, Any]
    log: list[str]
    versions: dict[str, str]
    seconds: float
    code: dict[str, str] = field(default_factory=dict)
    compilations: int = 0
    step_us: float = 0.0
    branches: dict[str, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    replays: dict[tuple[int, int], int] = field(default_factory=dict)


def save(record: EngineSpec | EngineResult, path: Path) -> None:
    """Write a record for another process of this run."""
    path.write_bytes(pickle.dumps(record))


def load(path: Path) -> Any:
    """Read what ``save`` wrote."""
    return pickle.loads(path.read_bytes())
