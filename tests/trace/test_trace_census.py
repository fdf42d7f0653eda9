"""Claims about the trace census, on traces that torch.profiler records here and on one written by hand.

The ops are stand-ins with the names of the real ones: what is under test is the counting, not the kernels.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tools import trace_census as tool

TOOL = Path(__file__).parents[2] / "tools" / "trace_census.py"
LAYERS, STEPS = 3, 2
UNFUSED = ("rotary_embedding", "concat_and_cache_mla", "decode_concat_quant_fp8")
FUSED = ("fused_qk_rope_concat_and_cache_mla",)

LIBRARY = torch.library.Library("trace_census_stand_ins", "DEF")
for _name in (*UNFUSED, *FUSED):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    # A cat inside: it belongs to the op and must not count as a concat of its own.
    LIBRARY.impl(_name, lambda x: torch.cat([x, x])[: x.shape[0]], "CPU")


def record(path: Path, ops: tuple[str, ...]) -> Path:
    """A trace of two decode steps of three layers, each calling ``ops``; a warm-up stands outside the steps."""
    x = torch.ones(4, 4)

    def layer() -> None:
        for name in ops:
            getattr(torch.ops.trace_census_stand_ins, name)(x)
        torch.mm(x, x)

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        layer()
        for _ in range(STEPS):
            with record_function("decode step"):
                for _ in range(LAYERS):
                    layer()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("traces")
    return record(folder / "off.json", UNFUSED), record(folder / "on.json", FUSED)


def test_an_unfused_trace_shows_three_launches_per_layer_and_step(recorded: tuple[Path, Path]) -> None:
    census = tool.count(recorded[0], marker="decode step")
    assert census.counts == dict.fromkeys(("rope", "kv write", "concat + quant"), LAYERS * STEPS)
    assert (census.kind, census.steps, census.layers) == ("CPU ops", STEPS, LAYERS)
    assert census.as_record()["launches_per_layer_and_step"] == 3
    assert census.as_record()["fused_share"] == 0


def test_a_fused_trace_shows_one(recorded: tuple[Path, Path]) -> None:
    census = tool.count(recorded[1], marker="decode step")
    assert census.counts == {"fused": LAYERS * STEPS}
    assert census.as_record()["launches_per_layer_and_step"] == 1
    assert census.as_record()["fused_share"] == 1


def test_without_a_marker_the_kv_writes_count_layers_times_steps(recorded: tuple[Path, Path]) -> None:
    census = tool.count(recorded[0])
    assert census.writes == LAYERS * STEPS + 1  # and the warm-up layer
    assert census.layers is None
    assert census.as_record()["per_layer_and_step"]["rope"] == 1


def test_two_traces_stand_side_by_side(recorded: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([*map(str, recorded), "--step-marker", "decode step"]) == 0
    out = capsys.readouterr().out
    assert "| per layer and step | off.json | on.json |" in out
    assert "| **launches** | 3.00 | 1.00 |" in out
    assert "| **fused** | 0 of 6 writes | 6 of 6 writes |" in out
    assert "on.json: CPU ops, 6 KV writes = 3 layers x 2 steps" in out


# Written by hand in the form of rocprof's --hip-trace JSON: numbers as text, kernels on a process named GPU0. No file
# of rocprof's was at hand; the kernel names are those of vllm-project/vllm#57452.
def rocprof_like() -> dict[str, Any]:
    names = [
        "vllm::concat_and_cache_mla_kernel<unsigned short, unsigned char, (vllm::Fp8KVCacheDataType)1>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>",
        "void aiter::scaled_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn, false>",
        "Cijk_Ailk_Bljk_BBS_BH_MT32x32x64",
        "CopyHostToDevice",
    ]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": "2", "name": "process_name", "args": {"name": "CPU HIP API"}},
        {"ph": "M", "pid": "6", "name": "process_name", "args": {"name": "GPU0"}},
        {"ph": "X", "pid": "2", "tid": "1", "name": "hipLaunchKernel concat_and_cache_mla", "ts": "0", "dur": "3"},
    ]
    for index in range(2 * len(names)):
        name = names[index % len(names)]
        events.append({"ph": "X", "pid": "6", "tid": "0", "name": name, "ts": str(10 * index), "dur": "5.0"})
    return {"traceEvents": events}


def test_a_trace_in_rocprofs_form_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "hip.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rocprof_like()).encode()))
    census = tool.count(path, steps=1)
    assert census.kind == "kernels"
    assert census.counts == {"kv write": 2, "concat": 2, "quant": 2}
    assert census.others == 2
    assert census.layers == 2
    assert census.as_record()["microseconds_per_layer_and_step"] == {"kv write": 5, "concat": 5, "quant": 5}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("void aiter::fuse_qk_rope_concat_and_cache_mla_per_head_kernel<...>", "fused"),
        ("void aiter::fuse_qk_rope_concat_and_cache_mla_kernel<...>", "fused"),
        ("aiter::fused_qk_rope_concat_and_cache_mla", "fused"),
        ("decode_prep_kernel", "fused"),
        ("vllm::concat_and_cache_mla_rope_fused_kernel<...>", "rope + kv"),
        ("vllm::concat_and_cache_mla_kernel<...>", "kv write"),
        ("triton_poi_fused__to_copy_cat_clamp_mul_reciprocal_view_0", "concat + quant"),
        ("triton_poi_fused_cat_3", "concat"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, false>", "rope"),
        ("ck::kernel_gemm_xdlops", None),
        ("void wvSplitK_europe_kernel", None),
    ],
)
def test_kernel_names_have_their_roles(tmp_path: Path, name: str, role: str | None) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([{"ph": "X", "cat": "kernel", "name": name, "ts": 1, "dur": 2, "pid": 0, "tid": 7}]))
    assert tool.count(path).counts == ({} if role is None else {role: 1})


def test_the_plugins_own_kernels_are_known_by_their_names() -> None:
    source = (TOOL.parent.parent / "vllm_aiter_mla" / "kernels" / "triton" / "kernel.py").read_text()
    assert "def decode_prep_kernel(" in source


def test_a_pattern_can_be_replaced(recorded: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(recorded[1]), "--pattern", "fused=nothing", "--json"]) == 0
    census = json.loads(capsys.readouterr().out)["traces"][0]
    assert "fused" not in census["counts"]
    assert census["counts"]["kv write"] == LAYERS * STEPS + 1


def event(**changed: Any) -> str:
    """A trace of one kernel."""
    one = {"ph": "X", "cat": "kernel", "name": "concat_and_cache_mla", "ts": 1, "dur": 2, "pid": [0], "tid": {}}
    return json.dumps([one | changed])


def test_hostile_names_of_files_and_kernels_stay_in_their_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a|b`<img src=x>\x1b[2J.json"
    path.write_text(event())
    assert tool.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "| per layer and step | a\\|b\\`&lt;img src=x&gt;" in out
    path.write_text(event(name="\x1b[2J", ts="soon"))
    assert tool.main([str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_broken_gzip_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gzip.compress(event().encode())
    (tmp_path / "t.json.gz").write_bytes(packed[:12] + b"\xff" + packed[13:])
    assert tool.main([str(tmp_path / "t.json.gz")]) == 2
    assert "t.json.gz: not a readable JSON trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "arguments", "status", "told"),
    [
        ("not json", [], 2, "not a readable JSON trace"),
        ('{"rocprofiler-sdk-tool": []}', [], 2, "no traceEvents"),
        ('{"traceEvents": []}', ["--step-marker", "x"], 2, "no annotation matches"),
        ('{"traceEvents": []}', ["--pattern", "nonsense=x"], 2, "ROLE=REGEX"),
        ('{"traceEvents": []}', ["--pattern", "fused=("], 2, "--pattern fused=(: not a regular expression"),
        ('{"traceEvents": []}', ["--pattern", "fused="], 2, "--pattern fused=: an empty pattern"),
        ('{"traceEvents": []}', ["--step-marker", "["], 2, "--step-marker [: not a regular expression"),
        ('{"traceEvents": []}', ["--steps", "0"], 2, "--steps 0: must be 1 or more"),
        ('{"traceEvents": []}', ["--steps", "-3"], 2, "--steps -3: must be 1 or more"),
        (event(ts="soon"), [], 2, "the event 'concat_and_cache_mla' has ts='soon': a number"),
        (event(dur=None), [], 2, "has dur=None: a number"),
        (event(ts=float("inf")), [], 2, "has ts=inf: a number"),
        (event(ts=[1]), ["--steps", "1"], 2, "has ts=[1]: a number"),
        ("[" * 100_000, [], 2, "not a readable JSON trace"),
        (event(name="gemm"), [], 1, "no KV write among 1 kernels: not an MLA model's decode steps"),
        ('{"traceEvents": []}', [], 1, "no KV write: the trace holds no kernel and no CPU op"),
    ],
)
def test_what_cannot_be_counted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, arguments: list[str], status: int, told: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert tool.main([str(path), *arguments]) == status
    assert told in capsys.readouterr().err


def test_the_tool_runs_as_a_script_without_torch(recorded: tuple[Path, Path]) -> None:
    done = subprocess.run([sys.executable, "-S", str(TOOL), str(recorded[1])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "7 of 7 writes" in done.stdout
