"""Run a graph on real tensors, rewrite it, and compare what each form computes: the output and every cache byte."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensor
from vllm.config import VllmConfig

from tests.passes.graphs import Layer, Spelling, infer
from tests.passes.stubs import BATCHES, Batch, StubLayer, forward
from tests.sandbox import gpu_ops
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat.layer import FUSED_ROPE, ROTARY_KERNEL, layers_of_forward_context
from vllm_aiter_mla.kernels.reference import rotate
from vllm_aiter_mla.passes import pipeline
from vllm_aiter_mla.serving import layer

aten = torch.ops.aten
STOPS = ("rope_kv_cache", "q_prep_lift", None)
ARITHMETIC = frozenset({aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.mul.Scalar})
MOVES = frozenset({aten.cat.default, aten.stack.default, aten.slice_scatter.default})
ALIASES = frozenset(
    {aten.reshape.default, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default}
)


class Runner(fx.Interpreter):
    """Eager execution with Inductor's rounding: a chain of elementwise bf16 ops stays in float32 until it is stored."""

    def run_node(self, n: fx.Node) -> Any:
        """Widen the operands of arithmetic; narrow what anything else reads."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in ARITHMETIC or (n.target in MOVES and _some_float32(args)):
            args = fx.node.map_aggregate(args, _widened)
        elif n.target not in ALIASES and n.target is not getattr:
            nodes = (n.args, n.kwargs)
            args, kwargs = _narrowed(nodes, (args, kwargs))
        return self.call_function(n.target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The rotary ops by the reference: on a CPU FlashInfer's and AITER's have no kernel."""
        if target in rotary_ops():
            return _rotate(**kwargs)
        if target is auto_functionalized and args[0] in rotary_ops():
            query, key = kwargs["query"].clone(), kwargs["key"].clone()
            return None, *_rotate(**kwargs | {"query": query, "key": key})
        return super().call_function(target, args, kwargs)


def rotary_ops() -> set[Any]:
    names = ("flashinfer_rotary_embedding", "rocm_aiter_triton_rotary_embedding")
    found = {getattr(torch.ops.vllm, name).default for name in names if hasattr(torch.ops.vllm, name)}
    return {torch.ops._C.rotary_embedding.default, *found}


def _rotate(offsets: None = None, **operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert offsets is None, "not modelled"
    gpu_ops.rotary_embedding(**operands)
    return operands["query"], operands["key"]


def _some_float32(args: Any) -> bool:
    found: list[bool] = []
    fx.node.map_aggregate(args, lambda a: found.append(isinstance(a, torch.Tensor) and a.dtype == torch.float32))
    return any(found)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _narrowed(node: Any, value: Any) -> Any:
    """``value`` with each tensor in the dtype that its node declares."""
    if isinstance(node, fx.Node):
        declared = node.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(declared, torch.Tensor) and value.dtype != declared.dtype:
            return value.to(declared.dtype)
        return value
    if isinstance(node, dict):
        return {key: _narrowed(item, value[key]) for key, item in node.items()}
    if isinstance(node, (list, tuple)):
        return type(value)(_narrowed(a, b) for a, b in zip(node, value, strict=True))
    return value


def inputs_of(gm: fx.GraphModule, rows: int, layers: list[StubLayer]) -> list[Any]:
    """Real values for the placeholders: random data, positions inside the table, the layers' names and k_scales."""
    generator = torch.Generator().manual_seed(3)
    scales = iter([layer._k_scale for layer in layers])  # the only scalars, in the order of the layers
    values: list[Any] = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            break
        fake = node.meta["val"]
        if isinstance(fake, torch.SymInt):
            values.append(rows)
        elif not isinstance(fake, torch.Tensor):
            values.append(fake.real_obj)
        elif not fake.dim():
            values.append(next(scales))
        else:
            values.append(_real(fake, rows, generator))
    return values


def _real(fake: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    shape = [size if isinstance(size, int) else rows for size in fake.shape]
    if fake.dtype == torch.int64:
        return torch.randint(0, 20, shape, generator=generator)
    return (torch.randn(shape, generator=generator) / (1 if len(shape) < 2 else shape[0] ** 0.25)).to(fake.dtype)


def _rotate_in_op(inner: Callable[..., None], op: str, positions: Any, q: Any, k: Any, table: Any, neox: bool) -> None:
    """What the plugin's op calls to rotate, without a kernel for GPUs."""
    if op == ROTARY_KERNEL:
        inner(op, positions, q, k, table, neox)
    else:
        assert op in {target._schema.name for target in rotary_ops()}
        gpu_ops.rotary_embedding(positions, q, k, k.shape[-1], table, neox)


def fused_op_rounds_once() -> contextlib.AbstractContextManager[Any]:
    """Let vLLM's fused op round its rotation once, as Inductor's code does."""
    return mock.patch.object(gpu_ops, "rotate", lambda x, cos, sin, is_neox, _=None: rotate(x, cos, sin, is_neox))


@dataclass
class Outcome:
    """Outputs of the real rows, and each layer's cache."""

    outputs: list[torch.Tensor]
    caches: list[torch.Tensor] = field(default_factory=list)


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that no outcome depends on what was in memory before."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def execute(gm: fx.GraphModule, layers: list[StubLayer], batch: Batch) -> Outcome:
    rotation = mock.patch.object(
        compat_layer, "rotary_embedding", partial(_rotate_in_op, compat_layer.rotary_embedding)
    )
    with forward(layers, batch), torch.no_grad(), nan_in_new_memory(), rotation:
        outputs = Runner(gm).run(*inputs_of(gm, batch.rows, layers))
        return Outcome([out[: batch.real].clone() for out in outputs], [layer.kv_cache.clone() for layer in layers])


def assert_same(got: Outcome, want: Outcome, where: str, exact: bool = True) -> None:
    """Equal outputs and equal cache bytes; ``exact`` False allows for another order of float32 roundings."""
    for name, ours, theirs in (("output", got.outputs, want.outputs), ("KV cache", got.caches, want.caches)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name} {index} {where}"
            equal = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            assert equal, f"{name} {index} differs {where}: {(a.float() - b.float()).abs().max()}"


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that shares the fake values."""
    graph = fx.Graph()
    remap: dict[fx.Node, fx.Node] = {}
    out = graph.graph_copy(gm.graph, remap)
    graph.output(out)
    return fx.GraphModule({}, graph)


def skipped_in_graphs(stubs: list[StubLayer]) -> dict[str, tuple[str, str]]:
    """Code and reason of each layer that the graphs of these stubs do not call the op for."""
    found = {stub.layer_name: layer.Layer.of(stub).graph_skip for stub in stubs}
    return {name: (skip.code, skip.message) for name, skip in found.items() if skip is not None}


def stubs_for(layers: list[Layer], spelling: Spelling, **options: Any) -> list[StubLayer]:
    return [StubLayer(layer.name, spelling.sizes, spelling.dtype, spelling.cache, **options) for layer in layers]


@contextlib.contextmanager
def only_passes_up_to(stop: str | None) -> Iterator[None]:
    """Leave out the passes after this one; None leaves out none."""
    names = list(pipeline.PASSES)
    kept = names[: names.index(stop) + 1] if stop else names
    with mock.patch.object(pipeline, "PASSES", {name: pipeline.PASSES[name] for name in kept}):
        yield


def rewrite(gm: fx.GraphModule, layers: list[StubLayer], stop_after: str | None = None) -> dict[str, int]:
    """The plugin's rewriting as the pipeline runs it, or its first passes up to one."""
    with forward(layers, BATCHES[0]), only_passes_up_to(stop_after):
        return pipeline.rewrite(gm.graph, layers_of_forward_context())


@cache
def _vllm_passes() -> tuple[Any, Any]:
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.compilation.passes.utility.post_cleanup import PostCleanupPass

    return PostCleanupPass(VllmConfig()), FixFunctionalizationPass(VllmConfig())


def _finished(gm: fx.GraphModule) -> fx.GraphModule:
    """Lint, and give new nodes their fake values, which torch infers once the custom passes have run."""
    gm.graph.lint()
    values = (node.meta.get("val") for node in gm.graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            infer(node, mode)
    gm.recompile()
    return gm


def clean(gm: fx.GraphModule) -> fx.GraphModule:
    """vLLM's PostCleanupPass."""
    _vllm_passes()[0](gm.graph)
    return _finished(gm)


def defunctionalise(gm: fx.GraphModule) -> fx.GraphModule:
    """vLLM's FixFunctionalizationPass, on a copy."""
    gm = clone(gm)
    _vllm_passes()[1](gm.graph)
    return _finished(gm)


def assert_rewritten_right(
    gm: fx.GraphModule, layers: list[StubLayer], *, batches: tuple[Batch, ...] = BATCHES,
    stops: tuple[str | None, ...] = STOPS, exact: bool = True,
    disturb: Callable[[fx.GraphModule], Any] = lambda gm: None,
) -> dict[str, int]:  # fmt: skip
    """Every chain of passes leaves a graph that lints, survives vLLM's clean-up and computes what ``gm`` computes.

    Args:
        gm: the graph before; left as it is.
        layers: what its layer names stand for.
        batches: the steps to compare.
        stops: where to end the chain.
        exact: bit for bit, or up to float32 rounding.
        disturb: applied to each copy before it is rewritten.

    Returns:
        The counts of the last chain.
    """
    reference = clean(clone(gm))
    # A graph that only the first passes have rewritten serves nobody: its form is compared, not the roundings of the op
    # that pass 1 puts in.
    is_fused = bool(calls(reference, FUSED_ROPE.partition("::")[2]))
    want = {batch: execute(reference, layers, batch) for batch in batches}
    counts: dict[str, int] = {}
    for stop in stops:
        changed = clone(gm)
        disturb(changed)
        counts = rewrite(changed, layers, stop)
        cleaned = clean(changed)
        for stage, made in (("cleaned", lambda gm: gm), ("defunctionalised", defunctionalise)):
            form = made(cleaned)  # the second one once the first has been compared: vLLM's pass may trip over a bug
            for batch in batches:
                with contextlib.nullcontext() if stop is None or is_fused else fused_op_rounds_once():
                    got = execute(form, layers, batch)
                assert_same(got, want[batch], f"({stage}, stop={stop}, {batch.name})", exact)
    return counts


def calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    found = []
    for node in gm.graph.nodes:
        target = node.args[0] if node.target is auto_functionalized else node.target
        if node.op == "call_function" and getattr(target, "_schema", None) is not None:
            found += [node] if target._schema.name.split("::")[1] == name else []
    return found
