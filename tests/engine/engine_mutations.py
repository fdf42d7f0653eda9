"""Planted bugs. An engine's process calls one of them before its config is built.

Each calls ``plugin.spoil``, or ``plugin.bug_ran`` where it does its harm. An engine in which no bug ran is no result.
"""

from tests.sandbox import plugin


def attention_does_not_split() -> None:
    """vLLM does not cut the graph at our op: a piece would hold it."""
    from vllm.compilation import backends

    from vllm_aiter_mla.admission import ATTENTION_OPS

    def split(inner, graph, ops):
        return inner(graph, [op for op in ops if op not in ATTENTION_OPS])

    plugin.spoil(backends, "split_graph", split)


def prefill_rows_stay_raw_and_passes_ignore_the_range() -> None:
    """Two independent bugs: tokens of batches within the decode limit show one, the graph above it the other.

    The op rotates copies of prefill rows for their KV rows and hands the raw rows on. The passes run in every compile
    range; no batch of the scenarios is above the decode limit.
    """
    from vllm_aiter_mla import admission
    from vllm_aiter_mla.serving import ops

    plugin.spoil(
        ops, "rotate_and_write", lambda inner, step, q, k_pe, *rest: inner(step, q.clone(), k_pe.clone(), *rest)
    )
    admission.is_within_limit = lambda end, limit: True


def every_second_layer_is_skipped() -> None:
    """The plugin has another fingerprint than the one that compiled the artifact, and skips one of two layers.

    The artifact holds both layers fused. The skip happens while a graph is rewritten, because an earlier one changes
    the cache key.
    """
    from vllm_aiter_mla import packages
    from vllm_aiter_mla.admission import Skip
    from vllm_aiter_mla.passes import pipeline

    skip = Skip("geometry", "skipped by the test")
    plugin.spoil(pipeline, "_query_dtype_or_skip", lambda *_: skip, when=lambda match, *_: ".0." in match.layer_name)
    packages.fingerprint = lambda: "0.0.0-changed"


def no_implementation_is_known() -> None:
    from vllm_aiter_mla.compat import layer as compat_layer

    compat_layer.KNOWN_IMPLS.clear()
    plugin.bug_ran()


def a_private_function_is_renamed() -> None:
    """vLLM's MLA layer has the function under a new name; the plugin looks for the old one."""
    from vllm.model_executor.layers.attention import attention, mla_attention

    assert mla_attention.get_attention_context
    del attention.get_attention_context
    plugin.bug_ran()


def vllms_fused_op_rounds_once() -> None:
    """vLLM's fused RoPE + KV write rounds its rotation once, as Inductor's code does."""
    from tests.sandbox import gpu_ops

    plugin.spoil(gpu_ops, "rotate", lambda inner, x, cos, sin, is_neox, *_: inner(x, cos, sin, is_neox))


def every_batch_is_rotated_by_vllms_fused_op() -> None:
    """Batches that no kernel of ours takes run vLLM's fused RoPE + KV write, which rounds three times in bf16."""
    from vllm_aiter_mla.compat.layer import FUSED_ROPE
    from vllm_aiter_mla.serving import ops

    def rotates(inner, step, q, k_pe, kv_c, rope):
        return inner(step, q, k_pe, kv_c, rope._replace(rotation=FUSED_ROPE))

    plugin.spoil(ops, "rotate_and_write", rotates)


def q_scale_is_applied_twice() -> None:
    """The query is scaled before the kernel and by it."""
    from vllm_aiter_mla.kernels import absorb

    plugin.spoil(absorb, "absorb_plain", lambda inner, q_nope, w: inner(q_nope, w) / 0.7)


def every_query_has_the_scale_of_the_first_layer() -> None:
    from tests.support import first_layer
    from vllm_aiter_mla.serving.layer import Layer

    Layer.q_scale = first_layer.q_scale(plugin.bug_ran)


def every_cache_has_the_scale_of_the_first_layer() -> None:
    """The ops that pass 3 puts in write KV rows with it; attention reads them with the layer's own."""
    from tests.support import first_layer
    from vllm_aiter_mla.passes import pipeline

    pipeline.PASSES["aiter_fusion"] = first_layer.pass_three(ran=plugin.bug_ran)


def the_aiter_kernel_is_wrong() -> None:
    """AITER's kernel rotates by the wrong pairing: what a broken build would do."""
    from dataclasses import replace

    from vllm_aiter_mla.kernels.aiter.backend import AiterBackend

    def run(inner, *given):
        return inner(*given[:-1], replace(given[-1], is_neox=not given[-1].is_neox))

    plugin.spoil(AiterBackend, "_run", run)


def a_request_has_one_decode_row() -> None:
    """Decode attention reads one row of a request for all of its rows: wrong as soon as there are drafts.

    The last one, because the first decides the next token whether or not a draft is accepted.
    """
    from vllm_aiter_mla.serving import ops

    def decode(inner, step, q_prepared, output):
        n, requests = step.num_actual_tokens, step.metadata.num_decodes
        last = q_prepared[:n].view(requests, n // requests, *q_prepared.shape[1:])[:, -1:]
        rows = last.expand(-1, n // requests, -1, -1).reshape(n, *q_prepared.shape[1:])
        inner(step, rows.contiguous(), output)

    plugin.spoil(ops, "decode", decode)


def a_mixed_batch_counts_as_decode() -> None:
    """The op looks for decode rows in the metadata and ignores prefill rows."""
    from vllm_aiter_mla.compat import layer as compat_layer

    plugin.spoil(compat_layer, "is_decode_only", lambda inner, metadata, slots: metadata.decode is not None)


def padding_has_the_slot_of_another_row() -> None:
    """A row without a slot is written over a row that has one; it shows only where a full graph is padded."""
    import torch

    from vllm_aiter_mla.serving import ops

    def prepared_query(inner, step, *rest):
        return inner(step._replace(slots=torch.where(step.slots < 0, step.slots.max(), step.slots)), *rest)

    plugin.spoil(ops, "prepared_query", prepared_query)


def pieces_keep_what_they_captured_to_measure_memory() -> None:
    """Pieces are not captured again when vLLM has thrown away the KV cache and the slots over which it measured."""
    from tests.sandbox.cuda_graphs import PieceGraphs

    plugin.spoil(PieceGraphs, "forget_all", lambda inner: None)


def the_platform_drops_an_option() -> None:
    """vLLM's CPU platform switches asynchronous scheduling off, and the sandbox does not put it back."""
    from tests.sandbox import platform

    def restore(inner, config, *asked):
        inner(config, *asked)
        config.scheduler_config.async_scheduling = False

    plugin.spoil(platform, "_restore", restore)


def the_wrappers_forward_is_unknown() -> None:
    """Another plugin has wrapped the forward of vLLM's wrapper, with ``functools.wraps``."""
    import functools

    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper as Wrapper

    inner = Wrapper.forward

    @functools.wraps(inner)
    def forward(self, *args, **kwargs):
        plugin.bug_ran()
        return inner(self, *args, **kwargs)

    Wrapper.forward = forward


def the_check_fails_on_rank_1() -> None:
    """Spawned ranks plant it themselves: the sandbox's plugin reads the variable in each."""
    import os

    import torch

    from vllm_aiter_mla.startup import checks
    from vllm_aiter_mla.startup.comparison import Comparison

    os.environ[plugin.MUTATION] = f"{__name__}:{the_check_fails_on_rank_1.__name__}"

    failed = Comparison(False, "self-check FAILED: planted", {}, 0)
    plugin.spoil(checks, "check_kernel", lambda *_: failed, when=lambda *_: torch.distributed.get_rank() == 1)


def query_and_key_are_swapped() -> None:
    """The op gets the rope part of the key in the first head of the query, and that head's rope part as its key."""
    from vllm_aiter_mla.serving import module

    def project(inner, wrapper, hidden_states):
        q, kv_c, k_pe = inner(wrapper, hidden_states)
        rope = k_pe.shape[-1]
        swapped = q.clone()
        swapped[:, 0, -rope:] = k_pe
        return swapped, kv_c, q[:, 0, -rope:]

    plugin.spoil(module, "_project", project)


def the_op_writes_no_kv_row() -> None:
    """The op prepares the query and leaves the KV cache as it is."""
    from vllm_aiter_mla.kernels import reference

    plugin.spoil(reference, "scatter_rows", lambda inner, cache, slots, rows: None)


def the_last_decode_row_reads_another_head() -> None:
    """One row of each decode step attends with the query of the next head: the others hide it in a mean."""
    from vllm_aiter_mla.serving import ops

    def decode(inner, step, q_prepared, output):
        q_prepared, last = q_prepared.clone(), step.num_actual_tokens - 1
        q_prepared[last] = q_prepared[last].roll(1, dims=0)
        inner(step, q_prepared, output)

    plugin.spoil(ops, "decode", decode, when=lambda step, *_: step.num_actual_tokens > 1)
