"""The pass as vLLM sees it: vLLM's graph dumps and logs show it, torch completes what it emits, and it travels."""

import copy
import inspect
import logging
import pickle
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from torch import fx
from torch._inductor import compile_fx
from torch._inductor.fx_utils import FakeTensorUpdater
from vllm.compilation.monitor import monitor_torch_compile
from vllm.compilation.passes import vllm_inductor_pass
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.config.utils import Range

from tests.passes.execute import only_passes_up_to
from tests.passes.stubs import DECODE, Sizes, StubLayer, forward
from tests.passes.traced import Captured, compiled, model
from vllm_aiter_mla import packages
from vllm_aiter_mla.passes import pipeline
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import DebugSettings, Settings

VLLMS, OURS = "unified_mla_attention_with_output", "mla_attention_with_rope"


def pass_of(**changes):
    """A pass whose worker has checked its kernels."""
    config = changes.pop("config", None) or VllmConfig()
    made = AiterMLAPipeline(config, **{"limit": 16, "settings": Settings(enabled=True), **changes})
    made.key = ()
    return made


@dataclass
class Compilation:
    """What one compilation leaves: the dumped graphs, vLLM's debug lines, the final graph, what the status counts."""

    dumps: dict[str, str]
    lines: list[str]
    graph: fx.GraphModule
    counted: dict[str, dict[str, int]]


def compile_with_vllm(folder, stop_after=None):
    """Compile two layers with vLLM's pass manager, the plugin's pass in it, and vLLM's ``debug_dump_path`` set."""
    config = VllmConfig(compilation_config=CompilationConfig(debug_dump_path=folder))
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE  # vLLM's CPU platform would not keep it
    manager, lines, final = PostGradPassManager(), [], []
    manager.configure(config)
    manager.add(pass_of(config=config))
    real = compile_fx.post_grad_passes

    def post_grad_passes(gm, *args):
        real(gm, *args)
        final.append(gm)
        raise Captured

    handler, logger = logging.Handler(), vllm_inductor_pass.logger
    handler.emit = lambda record: lines.append(record.getMessage())
    module, names = model("deepseek", False, layers=2, q_lora=True, dtype=torch.bfloat16)
    stubs = [StubLayer(name, Sizes(), torch.bfloat16) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_fx, "post_grad_passes", post_grad_passes)
        patch.setattr(logger, "handlers", [handler])
        # vLLM counts the matches of all compilations of a process together.
        patch.setattr(vllm_inductor_pass.VllmPatternMatcherPass, "match_table", defaultdict(int))
        logger.setLevel(logging.DEBUG)
        stopped = only_passes_up_to(stop_after)
        with forward(stubs, DECODE), pass_context(Range(1, 16)), monitor_torch_compile(config), stopped:
            compiled(module, torch.bfloat16, manager)
        logger.setLevel(logging.NOTSET)
    counted = Layer.of(stubs[0]).engine_status.pass_counts
    return Compilation({path.name: path.read_text() for path in folder.rglob("*post_grad*")}, lines, final[0], counted)


@pytest.fixture(scope="module")
def compilation(tmp_path_factory):
    return compile_with_vllm(tmp_path_factory.mktemp("dumps"))


def test_vllms_debug_dump_path_holds_the_graph_before_and_after_the_pipeline(compilation):
    (before,) = (text for name, text in compilation.dumps.items() if ".AiterMLAPipeline.before." in name)
    (after,) = (text for name, text in compilation.dumps.items() if ".AiterMLAPipeline.after." in name)
    assert (before.count(f"{VLLMS}.default"), before.count(OURS)) == (2, 0)
    assert (after.count(VLLMS), after.count(f"{OURS}.default(")) == (0, 2)


def test_vllms_debug_log_has_the_time_and_the_matches_of_the_pipeline(compilation):
    assert [line for line in compilation.lines if line.startswith("AiterMLAPipeline completed in")]
    (matches,) = (line for line in compilation.lines if line.startswith("fusion pass matches:"))
    assert "'AiterMLAPipeline': 2" in matches


def test_what_the_passes_did_counts_for_the_engine_of_the_layers(compilation):
    """VLLM compiles with a copy of the pass: the layers know their engine's status."""
    (counts,) = compilation.counted.values()
    assert (list(compilation.counted), counts["matched"], counts["skipped"]) == (["1-16"], 2, 0)


def assert_complete(gm):
    """Check that every node has the fake value that its op makes of those of its arguments."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        if isinstance(value := node.meta["val"], torch.Tensor):
            with value.fake_mode:
                again = node.target(*args, **kwargs)
            assert (str(again.shape), again.dtype) == (str(value.shape), value.dtype), node


def test_torch_infers_the_fake_values_of_what_the_passes_emit(compilation):
    assert_complete(compilation.graph)
    assert sum(OURS in str(node.target) for node in compilation.graph.graph.nodes) == 2


# An older torch infers nothing behind a functionalised op, which a chain leaves in the graph only if it is stopped.
@pytest.mark.skipif("gm" not in inspect.signature(FakeTensorUpdater).parameters, reason="this torch infers less")
@pytest.mark.parametrize("stop", ["rope_kv_cache", "q_prep_lift"])
def test_torch_infers_the_fake_values_of_a_chain_that_is_stopped(stop, tmp_path):
    assert_complete(compile_with_vllm(tmp_path, stop).graph)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_the_pass_is_the_same_in_another_process(again):
    made = pass_of(chained=pass_of(limit=4), settings=Settings(enabled=True, debug=DebugSettings(rounding="two")))
    arrived = again(made)
    assert arrived.uuid() == made.uuid() == pass_of(chained=made.chained, settings=made.settings).uuid()
    assert (arrived.limit, arrived.settings, arrived.chained.limit) == (16, made.settings, 4)


def test_the_uuid_holds_all_that_decides_the_graph(monkeypatch):
    changed = [pass_of(), pass_of(limit=8), pass_of(integration="module")]
    changed += [pass_of(chained=pass_of()), pass_of(chained=pass_of(limit=8))]
    unchecked, other_kernels = pass_of(), pass_of()
    unchecked.key, other_kernels.key = None, ("triton",)
    changed += [unchecked, other_kernels, pass_of(settings=Settings(enabled=True, kernel="triton"))]
    found = {made.uuid() for made in changed}
    monkeypatch.setattr(packages, "fingerprint", lambda: "changed")
    assert len(found | {pass_of().uuid()}) == len(changed) + 1
    assert not pass_of(integration="module").is_applicable_for_range(Range(1, 16))


@pytest.mark.mutation
def test_mutation_torch_completes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(FakeTensorUpdater, "incremental_update", lambda self: 0)
    with pytest.raises(KeyError, match="val"):
        assert_complete(compile_with_vllm(tmp_path).graph)


@pytest.mark.mutation
def test_mutation_the_matches_are_not_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(
        pipeline, "VllmPatternMatcherPass", type("Elsewhere", (), {"match_table": {"AiterMLAPipeline": 0}})
    )
    with pytest.raises(ValueError, match="unpack"):
        test_vllms_debug_log_has_the_time_and_the_matches_of_the_pipeline(compile_with_vllm(tmp_path))
