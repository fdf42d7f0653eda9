"""The sandbox: only its processes see its vLLM plugin, and its mended parts of vLLM do what vLLM would on a GPU."""

import os
import subprocess
import sys
from importlib.metadata import distributions, entry_points
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from tests.sandbox import check, engine, gpu_ops, platform, plugin
from tests.sandbox.card import PageIndices
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions
from tests.support import plans
from vllm_aiter_mla import status
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.plan import model

GROUP = "vllm.general_plugins"


def test_make_demo_plans_and_runs_its_engine_over_each_cache(monkeypatch):
    caches = []

    def ask(source, arguments, *_):
        return plans.made_up(kv_cache_dtype="fp8" if "fp8" in arguments else "auto")

    def engine_of(context):
        caches.append(context.plan.options.kv_cache_dtype)
        return steps.Step("passed", "")

    monkeypatch.setattr(model, "ask", ask)
    replaced = {"plan": steps.plan, "engine": engine_of, "decode against prefill": engine_of}
    monkeypatch.setattr(steps, "STEPS", replaced)
    check.main()
    assert caches == ["auto", "auto", "fp8", "fp8"]


def test_no_installed_package_lists_the_sandbox():
    assert plugin.NAME not in entry_points(group=GROUP).names


@pytest.mark.parametrize(
    "spec",
    [EngineSpec(), EngineSpec(emulation=Emulation(device="gpu")), EngineSpec(plugin=PluginOptions(loaded=False))],
)
def test_an_engine_finds_the_sandboxs_plugin_and_inherits_the_path_but_not_the_gauge(spec, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "given")
    monkeypatch.setenv(status.record.RUN, str(tmp_path))
    environment = engine.environment_for(spec, tmp_path, tmp_path)
    assert status.record.RUN not in environment
    first, *rest = environment["PYTHONPATH"].split(os.pathsep)
    assert rest == [str(plugin.CHECKOUT), "given"]
    (found,) = distributions(path=[first])
    loaded = {entry.group: entry.load() for entry in found.entry_points if entry.name == plugin.NAME}
    assert loaded == {GROUP: plugin.activate, "vllm.platform_plugins": platform.find_ray}
    assert environment["VLLM_PLUGINS"].split(",") == ["aiter_mla", plugin.NAME][not spec.plugin.loaded :]


def test_only_engines_on_ray_get_a_platform_that_ray_can_count(monkeypatch, tmp_path):
    monkeypatch.delenv(platform.RAY_SWITCH, raising=False)
    assert platform.find_ray() is None
    assert platform.RAY_SWITCH not in engine.environment_for(EngineSpec(), tmp_path, tmp_path)
    on_ray = EngineSpec(vllm=VllmOptions(extra={"distributed_executor_backend": "ray"}))
    assert engine.environment_for(on_ray, tmp_path, tmp_path)[platform.RAY_SWITCH] == "1"
    monkeypatch.setenv(platform.RAY_SWITCH, "1")
    assert platform.find_ray() == "tests.sandbox.platform.RayCpuPlatform"


def test_an_interrupted_run_leaves_no_engine_behind():
    def interrupted():
        yield "up"
        raise KeyboardInterrupt

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.stdout = interrupted()
    with pytest.raises(KeyboardInterrupt):
        engine._read(process)
    assert process.poll() is not None


class Selector(NamedTuple):
    use_mla: bool
    kv_cache_dtype: str


def test_vllm_033_lets_mla_and_nothing_else_have_an_fp8_cache_on_a_cpu():
    class Platform:
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, config, num_heads=None):
            if config.kv_cache_dtype != "auto":
                raise ValueError("not supported on CPU")
            return f"{cls.__name__} {selected_backend} {num_heads}"

    platform.allow_fp8_mla(Platform)
    platform.allow_fp8_mla(Platform)
    found = Platform.get_attn_backend_cls("CPU_MLA", attn_selector_config=Selector(True, "fp8"), num_heads=4)
    assert found == "Platform CPU_MLA 4"
    with pytest.raises(ValueError, match="not supported"):
        Platform.get_attn_backend_cls("CPU_ATTN", Selector(False, "fp8"))


@pytest.mark.parametrize("real", [None, [3, 6]])
def test_vllm_033_repeats_the_first_page_past_a_requests_real_length(real):
    table = torch.tensor([[5, 2], [7, 1]], dtype=torch.int32)
    bounds = torch.tensor([0, 5, 11], dtype=torch.int32)
    found = torch.full((12,), -1, dtype=torch.int32)
    more = () if real is None else (torch.tensor(real, dtype=torch.int32),)
    tail = {} if real is None else {"CLAMP_TAIL": True}
    PageIndices()[(2, 1)](found, table, *table.stride(), bounds, *more, KERNEL_BLOCK_SIZE=4, BLOCK_SIZE=1024, **tail)
    first = [20, 21, 22, 23, 8] if real is None else [20, 21, 22, 20, 20]
    assert found.tolist() == [*first, 28, 29, 30, 31, 4, 5, -1]


@pytest.mark.parametrize("skip_scale", [(), (True,)], ids=["0.32", "0.33"])
def test_kv_rows_are_written_by_slot_in_both_releases(skip_scale):
    gpu_ops.register()
    kv_c, k_pe, cache = torch.randn(3, 8), torch.randn(3, 4), torch.zeros(2, 2, 12)
    slots = torch.tensor([2, -1, 0])
    torch.ops._C_cache_ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "auto", torch.ones(1), *skip_scale)
    rows = torch.cat([kv_c, k_pe], -1)
    assert torch.equal(cache.view(4, 12), torch.stack([rows[2], torch.zeros(12), rows[0], torch.zeros(12)]))


@given(ranks=st.integers(1, 4), held=st.integers(1, 5), tokens=st.integers(0, 6), seed=st.integers(0, 99))
def test_each_chosen_expert_has_weight_on_one_rank(ranks, held, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(ranks * held, (tokens, 2), generator=draw, dtype=torch.int32)
    weights = torch.rand(tokens, 2, generator=draw) + 0.5
    total = torch.zeros_like(weights)
    for rank in range(ranks):
        # As vLLM makes it: [experts] int32 local ids, -1 for an expert of another rank.
        expert_map = torch.full((ranks * held,), -1, dtype=torch.int32)
        expert_map[rank * held : (rank + 1) * held] = torch.arange(held, dtype=torch.int32)
        here, local = gpu_ops.local_experts(weights, ids, expert_map)
        assert local.dtype == ids.dtype
        assert ((local >= 0) & (local < held)).all()
        own = ids // held == rank
        assert torch.equal(here, torch.where(own, weights, torch.zeros_like(weights)))
        assert torch.equal(local[own], ids[own] - rank * held)
        total += here
    assert torch.equal(total, weights)


@pytest.mark.parametrize("mapped", [True, False])
def test_vllms_experts_get_local_ids_where_there_is_a_map(monkeypatch, mapped):
    seen = {}

    def inner(self, output, topk_weights, topk_ids, expert_map):
        seen.update(weights=topk_weights, ids=topk_ids)

    monkeypatch.setattr(cpu_moe.CPUUnquantizedExperts, "apply", inner)
    gpu_ops.mend_experts.__wrapped__()
    expert_map = torch.tensor([-1, -1, 0, 1]) if mapped else None
    ids = torch.tensor([[3, 0]])
    cpu_moe.CPUUnquantizedExperts.apply(object(), None, torch.ones(1, 2), topk_ids=ids, expert_map=expert_map)
    assert seen["ids"].tolist() == ([[1, 0]] if mapped else [[3, 0]])
    assert seen["weights"].tolist() == ([[1.0, 0.0]] if mapped else [[1.0, 1.0]])
