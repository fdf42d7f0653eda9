"""What one engine run of the sandbox is, and what it gives back: plain records that travel in files."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vllm_aiter_mla.commands.check.engine.record import Side
from vllm_aiter_mla.commands.compat.llm_engine import TokenLogprobs

Integration = Literal["module", "passes", "auto"]
Runner = Literal["v1", "v2"]
LIMIT_REQUESTS = 16
PARTITION = {"use_inductor_graph_partition": True}
"""What a user gives vLLM so that a graph holds whole layers, which the passes need."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The model, and what a user would write on vLLM's command line.

    Attributes:
        model: overrides of ``TinyDeepseek``.
        config: another model's ``config.json`` in place of it; its weights are drawn: see ``random_weights``.
        draft_config: ``config.json`` of an EAGLE-3 draft for ``config``; without it the model's own layer drafts.
        kv_cache_dtype: as vLLM spells it.
        drafts: tokens that the model's own draft layer proposes per step (MTP); above zero the model has one.
        max_num_seqs: requests at a time; times 1 + ``drafts`` it is the decode limit.
        max_num_batched_tokens: token budget of a step; below a prompt's length the prompt is chunked (bf16 cache).
        tensor_parallel_size: number of workers; above one they are spawned.
        compilation: overrides of ``compilation_config``.
        extra: further options of ``vllm.LLM``; they win over the sandbox's.
        own_pass: switch vLLM's own RoPE + KV pass on.
        lora: every second request goes through a LoRA adapter of random weights.
        shares_kv: write KV rows through vLLM's example connector into a folder of the cache root, and read them there.
        spawn: run the engine core in its own process, as vLLM does by default.
        runner: vLLM's model runner on a CPU. V2 is what vLLM itself takes where it finds Triton.
        compile_cache: keep vLLM's compile cache on, for warm starts.
    """

    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    draft_config: dict[str, Any] = field(default_factory=dict)
    kv_cache_dtype: str = "auto"
    drafts: int = 0
    max_num_seqs: int = LIMIT_REQUESTS
    max_num_batched_tokens: int = 512
    tensor_parallel_size: int = 1
    compilation: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    own_pass: bool = False
    lora: bool = False
    shares_kv: bool = False
    spawn: bool = False
    runner: Runner = "v2"
    compile_cache: bool = False


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """What the plugin is told; it reads this only if the flag is on.

    Attributes:
        kernel: the plugin's kernel option.
        integration: how the op gets into the model. The module is for vLLM's default options; see ``by_passes``.
        rounding: of the reference kernel, see ``DebugSettings``.
        additional: overrides of the plugin's ``additional_config`` mapping.
        loaded: load the plugin at all.
    """

    kernel: str = "auto"
    integration: Integration = "module"
    rounding: str = "two"
    additional: dict[str, Any] = field(default_factory=dict)
    loaded: bool = True


@dataclass(frozen=True, slots=True)
class Emulation:
    """What replaces the hardware.

    Attributes:
        device: "cpu" for the sandbox's platform; "gpu" for vLLM's own, with its Triton MLA back end.
        arch: let the platform look like this AMD card over the simulated AITER.
        attention: "sandbox" for the sandbox's back end, "aiter" for vLLM's own over ``arch``.
        absorb: hold absorbed weights in "fp8", or in "mxfp4" (gfx950 only), over the simulated AITER; None for plain.
        graphs: emulate the CUDA graphs that vLLM's ``cudagraph_mode`` asks for, by default full graphs for decode
            batches and pieces for the others.
        interpret: offer the plugin's Triton kernel too, through Triton's interpreter.
        linear: "onednn" is the CPU build's out-variant GEMM, "aten" a plain one, as on GPUs.
        scales: (k_scale, q_scale) of the first layer, put in after loading: see ``knobs.set_scales``; or None.
    """

    device: str = "cpu"
    arch: str | None = None
    attention: str = "sandbox"
    absorb: str | None = None
    graphs: bool = False
    interpret: bool = False
    linear: str = "onednn"
    scales: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """What is broken on purpose.

    Attributes:
        bug: "module:function" that plants a bug in the engine's process.
        stop_after: leave out the passes after this one.
    """

    bug: str | None = None
    stop_after: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine start in its own process, and what is asked of the engine.

    Attributes:
        scenarios: names from ``scenarios.SCENARIOS``, run one after the other.
        side: whether the flag is on. Nothing else of the user's options depends on it.
        reload: afterwards load the weights of this other seed and run the first scenario again, as "NAME, reloaded";
            then send the first weights in a weight transfer, "NAME, transferred".
        dump_graphs: return the post-grad FX graph text by range.
    """

    scenarios: tuple[str, ...] = ("concurrent",)
    vllm: VllmOptions = VllmOptions()
    plugin: PluginOptions = PluginOptions()
    emulation: Emulation = Emulation()
    fault: Fault = Fault()
    side: Side = "on"
    reload: int | None = None
    dump_graphs: bool = False


def by_passes(spec: EngineSpec) -> EngineSpec:
    """Return the engine with graph partition, as a user gives it, and the passes over its graph."""
    vllm = replace(spec.vllm, compilation=PARTITION | spec.vllm.compilation)
    return replace(spec, vllm=vllm, plugin=replace(spec.plugin, integration="passes"))


def flag_off(spec: EngineSpec) -> EngineSpec:
    """Return the same engine with the flag off."""
    return replace(spec, side="off", plugin=PluginOptions(), fault=Fault())


@dataclass(slots=True)
class EngineResult:
    """What an engine run gave.

    Attributes:
        scenarios: by scenario, the requests' tokens with their log-probabilities.
        status: one record per rank (see ``EngineStatus.make_record``); empty with the flag off.
        ranges: vLLM's compile ranges as [start, end].
        graphs: post-grad FX graph text by "start-end", where asked for; all pieces of a range in one text.
        log: the plugin's own log lines.
        versions: of Python, torch and vLLM.
        seconds: from the fork of its process to the last token.
        code: what Inductor made of ``graphs``, all pieces of a range in one text.
        compilations: graphs that Inductor compiled, counted where graphs are asked for.
        step_us: median time of an engine step in microseconds; of so small a model, most of it is Python.
        branches: how often the one op prepared decode rows, and how often it rotated in place, by the body's name; of
            this process.
        scheduler: the class of vLLM's scheduler.
        counters: vLLM's own, by the name of the metric; where ``vllm.extra`` sets ``disable_log_stats`` to False.
        captured: how many pieces vLLM captured, by the rows of their graphs.
        replayed: how often a piece was replayed, by its rows.
        replays: how often a full graph of the model was replayed, by its real rows and all of its rows.
        draft_replays: how often one of V2's draft was replayed, by its rows.
    """

    scenarios: dict[str, list[list[TokenLogprobs]]]
    status: list[dict[str, Any]]
    ranges: list[tuple[int, int]]
    graphs: dict[str, str]
    log: list[str]
    versions: dict[str, str]
    seconds: float
    code: dict[str, str] = field(default_factory=dict)
    compilations: int = 0
    step_us: float = 0.0
    branches: dict[str, int] = field(default_factory=dict)
    scheduler: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    captured: dict[int, int] = field(default_factory=dict)
    replayed: dict[int, int] = field(default_factory=dict)
    replays: dict[tuple[int, int], int] = field(default_factory=dict)
    draft_replays: dict[int, int] = field(default_factory=dict)

    def decode_range(self) -> str:
        """Return the compile range that decode steps run in, as ``graphs`` and ``code`` name it."""
        start, end = self.ranges[0]
        return f"{start}-{end}"

    def decode_graph(self) -> str:
        """Return the text of the graph that decode steps run in, or ""."""
        return self.graphs.get(self.decode_range(), "")


def save(record: EngineSpec | EngineResult, path: Path) -> None:
    """Write a record for another process of this run."""
    path.write_bytes(pickle.dumps(record))


def load(path: Path) -> Any:
    """Read what ``save`` wrote."""
    return pickle.loads(path.read_bytes())
