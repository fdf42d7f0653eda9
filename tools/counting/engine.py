"""The process of one counted engine: ``python -m tools.counting.engine SPEC OUT``.

It drives one batch of each kind through vLLM's engine and writes what one decoder layer did in each: everything after
the attention of one layer up to the attention of the next, what Inductor made included.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.counting import launches
from tools.counting.counter import Counter, Event, size, sizes

LIMIT = 64
"""L of the counted engines: prefill batches fall inside it."""
TOKENS = 128
"""Token budget of a step: a longer prompt is cut into chunks."""
PADDED = 8
DECODE_TOKENS = 40
ATTENTION = re.compile(r"^vllm(_aiter_mla)?::(unified_)?mla_attention_with_")
Counted = Callable[[], None]


def main(spec_path: str, out_path: str) -> None:
    """Build the engine, drive the batches, write the events of one layer by batch kind."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from tests.sandbox import child, knobs
    from tests.sandbox.spec import load

    spec = load(Path(spec_path))
    counter = Counter(launches.KERNELS)
    count_inductor(counter)
    knobs.apply(spec)
    count_vllm(counter)
    llm = child.build(spec, Path(spec_path).parent / "model")
    batches = Batches(llm.llm_engine, counter, chunks=spec.kv_cache_dtype == "auto")
    found = {kind: [asdict(event) for event in events] for kind, events in batches.run().items()}
    Path(out_path).write_text(json.dumps(found))


def count_inductor(counter: Counter) -> None:
    """Let each kernel that Inductor makes be a launch, with a kernel for each node that it has fused.

    On a CPU Inductor puts several such nodes into one C++ function; on a GPU each is a launch of its own.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.cpp import CppScheduling

    CppScheduling.ready_to_flush = lambda scheduling: True
    load = AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, argument_types: list[str], source: str) -> Any:
        kernel, names = load(self, argument_types, source), _argument_names(source)
        read = [not name.startswith("out_ptr") for name in names]
        written = [not name.startswith("in_ptr") for name in names]

        def moved(_: Any, *args: Any) -> int:
            operands = [value for value in args if isinstance(value, torch.Tensor)]
            times = [a + b for a, b in zip(read, written, strict=False)]
            return sum(size(value) * n for value, n in zip(operands, times, strict=True))

        def call(*args: Any) -> Any:
            function = kernel.result() if hasattr(kernel, "result") else kernel
            return counter.one_launch("Inductor", function, moved)(*args)

        return call

    AsyncCompile.cpp_pybinding = cpp_pybinding
    guards = torch._C._dynamo.guards
    empty_strided = guards._empty_strided_cpu

    def empty_strided_cpu(*args: Any) -> torch.Tensor:
        made = empty_strided(*args)
        if made.numel():
            counter.note("Inductor's buffer", 0, 1)
        return made

    guards._empty_strided_cpu = empty_strided_cpu


def _argument_names(source: str) -> list[str]:
    """Names of the pointers that a C++ kernel of Inductor's takes: ``in_ptr``, ``out_ptr``, ``in_out_ptr``."""
    signature = source[source.rindex('extern "C"') :]
    return re.findall(r"\*\s*(?:__restrict__\s*)?(\w*ptr\d+)", signature[: signature.index(")")])


def count_vllm(counter: Counter) -> None:
    """Let the CPU's stand-ins for GPU kernels that are Python functions count as one launch each."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    from tests.sandbox import attention, cuda_graphs

    def replace(owner: Any, name: str, what: str, bytes_of: Callable[..., int], allocations: int = 0) -> None:
        setattr(owner, name, counter.one_launch(what, getattr(owner, name), bytes_of, allocations))

    def all_operands(result: Any, *args: Any, **kwargs: Any) -> int:
        results = result if isinstance(result, tuple) else (result,)
        return sizes((*results, *args, *kwargs.values()))

    replace(attention, "write_kv_rows", "concat_and_cache_mla", lambda _, *args: launches.concat_and_write(*args[:4]))
    replace(mla_attention._DecodeConcatQuantFP8, "forward", "concat + fp8", all_operands, 1)
    for name in ("run_prefill_new_tokens", "run_prefill_context_chunk"):
        replace(CPUSDPAMLAPrefillBackend, name, "prefill attention", all_operands, 1)
    replace(_custom_ops, "gather_mla_context_cache_cpu", "gather", lambda _, **given: 2 * size(given["dst"]))
    replace(mla_attention, "merge_attn_states", "merge", all_operands)
    _custom_ops.concat_and_cache_mla_rope_fused = _with_its_slots(_custom_ops.concat_and_cache_mla_rope_fused)
    count_decode(counter, attention.SandboxMLAImpl)
    frozen = cuda_graphs._frozen

    def counted_piece(piece: Callable[..., Any], kind: str) -> Callable[..., Any]:
        run = frozen(piece, kind)

        def call(*args: Any, **kwargs: Any) -> Any:
            with counter.inside_a_piece():
                return run(*args, **kwargs)

        return call

    cuda_graphs._frozen = counted_piece


def _with_its_slots(kernel: Callable[..., None]) -> Callable[..., None]:
    """Give ``kernel`` the rows that have a slot: vLLM pads a piecewise graph's rows and not its slots.

    vLLM's GPU kernel takes the number of slots as its number of rows; the sandbox's wants as many of each.
    """

    def call(*args: Any) -> None:
        *rows, table, is_neox, slots, cache, dtype, scale = args
        kernel(*(row[: slots.shape[0]] for row in rows), table, is_neox, slots, cache, dtype, scale)

    return call


def count_decode(counter: Counter, implementation: Any) -> None:
    """A decode step as ``AiterMLAImpl`` makes it: it joins a query that comes in two parts, then one kernel."""
    inner = implementation.forward_mqa

    def moved(result: Any, impl: Any, q: Any, *rest: Any) -> int:
        return sizes((q, result[0]))

    launch = counter.one_launch("decode attention", inner, moved, 1)

    def forward_mqa(self: Any, q: Any, *rest: Any) -> Any:
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        return launch(self, q, *rest)

    implementation.forward_mqa = forward_mqa


class Batches:
    """One batch of each kind, driven through an engine and counted.

    Args:
        engine: vLLM's ``LLMEngine``, in this process.
        counter: what the step is counted by.
        chunks: whether prompts can be cut into chunks.
    """

    def __init__(self, engine: Any, counter: Counter, chunks: bool) -> None:
        self.engine, self.counter, self.chunks = engine, counter, chunks
        self._added = 0

    def run(self) -> dict[str, list[Event]]:
        """The events of one layer by kind of batch."""
        found = {
            "all short prompts": self._step(5, 6, 7, 5),
            "all decode": self._step(),
            "one prefill among decodes": self._step(6),
        }
        self._finish()
        found["one long prompt inside L"] = self._step(LIMIT - 16)
        self._finish()
        found["above L"] = self._step(LIMIT + 36)
        self._finish()
        if self.chunks:
            self._add(TOKENS + 22)
            self.engine.step()
            found["chunked: the last piece"] = self._step()
            self._finish()
        found["padded decode"] = self._padded()
        found["dummy"] = self._count(lambda: self._runner()._dummy_run(PADDED))
        return found

    def _step(self, *prompts: int) -> list[Event]:
        for length in prompts:
            self._add(length)
        return self._count(self.engine.step)

    def _padded(self) -> list[Event]:
        """Five decode rows in a graph of eight: vLLM's dispatcher of graphs says so, as it does where graphs are."""
        for length in (5, 6, 7, 5, 6):
            self._add(length)
        self.engine.step()
        dispatcher = self._runner().cudagraph_dispatcher
        inner = dispatcher.dispatch

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            from dataclasses import replace

            mode, descriptor = inner(*args, **kwargs)
            return mode, replace(descriptor, num_tokens=PADDED)

        dispatcher.dispatch = dispatch
        try:
            return self._count(self.engine.step)
        finally:
            dispatcher.dispatch = inner
            self._finish()

    def _count(self, step: Callable[[], Any]) -> list[Event]:
        self.counter.events.clear()
        with self.counter:
            step()
        return layer(self.counter.events)

    def _add(self, length: int) -> None:
        from vllm import SamplingParams

        self._added += 1
        prompt = {"prompt_token_ids": [2 + i % 500 for i in range(length)]}
        params = SamplingParams(temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self._added), prompt, params)

    def _finish(self) -> None:
        self.engine.abort_request([str(i + 1) for i in range(self._added)])
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _runner(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner


def layer(events: list[Event]) -> list[Event]:
    """What happened after the attention of one layer up to that of the next, out of the events of a step.

    Raises:
        ValueError: fewer than two layers ran.
    """
    ends = [index for index, event in enumerate(events) if ATTENTION.match(event.name)]
    if len(ends) < 2:
        raise ValueError(f"two layers expected, {len(ends)} calls of an attention op found among {len(events)} events")
    return events[ends[-2] + 1 : ends[-1]]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
