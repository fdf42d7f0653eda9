"""Planted bugs. An engine's process calls one of them before its config is built.

Each calls ``plugin.bug_ran`` where it does its harm; an engine in which that never happened is no result.
"""

from tests.sandbox import plugin


def attention_does_not_split() -> None:
    """The attention op is missing from the splitting set: piecewise graphs would hold it."""
    from torch._inductor import scheduler

    from vllm_aiter_mla import gate
    from vllm_aiter_mla.admission import ATTENTION_OPS

    inner = gate._split

    def split(compilation, integration):
        plugin.bug_ran()
        inner(compilation, integration)
        compilation.splitting_ops = [op for op in compilation.splitting_ops if op not in ATTENTION_OPS]

    gate._split = split
    scheduler.is_cudagraph_unsafe_op = lambda node: False  # the op's tag would cut as well


def prefill_rows_stay_raw_and_passes_ignore_the_range() -> None:
    """Two independent bugs: tokens of batches within the decode limit show one, the graph above it the other.

    The op rotates copies of prefill rows for their KV rows and hands the raw rows on. The passes run in every compile
    range; no batch of the scenarios is above the decode limit.
    """
    from vllm_aiter_mla import admission, ops

    inner = ops.rotate_and_write

    def rotate_and_write(step, q, k_pe, *rest):
        plugin.bug_ran()
        inner(step, q.clone(), k_pe.clone(), *rest)

    ops.rotate_and_write = rotate_and_write
    admission.within_limit = lambda end, limit: True


def every_second_layer_is_skipped() -> None:
    """The plugin has another fingerprint than the one that compiled the artifact, and skips one of two layers.

    The artifact holds both layers fused. The skip happens while a graph is rewritten, because an earlier one changes
    the cache key.
    """
    from vllm_aiter_mla import files
    from vllm_aiter_mla.admission import Skip
    from vllm_aiter_mla.passes import pipeline

    inner = pipeline._admit

    def admit(match, *rest):
        if ".0." not in match.layer_name:
            return inner(match, *rest)
        plugin.bug_ran()
        return Skip("geometry", "skipped by the test")

    pipeline._admit = admit
    files.fingerprint = lambda: "0.0.0-changed"


def no_implementation_is_known() -> None:
    """Every layer is skipped at admission."""
    from vllm_aiter_mla.compat import layer as compat_layer

    compat_layer.KNOWN_IMPLS.clear()
    plugin.bug_ran()


def a_private_function_is_renamed() -> None:
    """vLLM's MLA layer has the function under a new name; the plugin looks for the old one."""
    from vllm.model_executor.layers.attention import attention, mla_attention

    assert mla_attention.get_attention_context
    del attention.get_attention_context
    plugin.bug_ran()


def q_scale_is_applied_twice() -> None:
    """The query is scaled before the kernel and by it."""
    from vllm_aiter_mla.kernels import absorb

    inner = absorb.absorb_plain

    def absorb_plain(q_nope, w):
        plugin.bug_ran()
        return inner(q_nope, w) / 0.7

    absorb.absorb_plain = absorb_plain


def the_aiter_kernel_is_wrong() -> None:
    """AITER's kernel rotates by the wrong pairing: what a broken build would do."""
    from dataclasses import replace

    from vllm_aiter_mla.kernels.aiter.backend import AiterBackend

    inner = AiterBackend._run

    def run(self, *given):
        plugin.bug_ran()
        return inner(self, *given[:-1], replace(given[-1], is_neox=not given[-1].is_neox))

    AiterBackend._run = run


def a_request_has_one_decode_row() -> None:
    """Decode attention reads one row of a request for all of its rows: wrong as soon as there are drafts.

    The last one, because the first decides the next token whether or not a draft is accepted.
    """
    from vllm_aiter_mla import ops

    inner = ops.decode

    def decode(step, q_prepared, output):
        plugin.bug_ran()
        n, requests = step.num_actual_tokens, step.metadata.num_decodes
        last = q_prepared[:n].view(requests, n // requests, *q_prepared.shape[1:])[:, -1:]
        rows = last.expand(-1, n // requests, -1, -1).reshape(n, *q_prepared.shape[1:])
        inner(step, rows.contiguous(), output)

    ops.decode = decode


def a_mixed_batch_counts_as_decode() -> None:
    """The op looks for decode rows in the metadata and ignores prefill rows."""
    from vllm_aiter_mla.compat import layer as compat_layer

    def is_decode_only(metadata, slots):
        plugin.bug_ran()
        return metadata.decode is not None

    compat_layer.is_decode_only = is_decode_only


def padding_has_the_slot_of_another_row() -> None:
    """A row without a slot is written over a row that has one; it shows only where a full graph is padded."""
    import torch

    from vllm_aiter_mla import ops

    inner = ops.prepared_query

    def prepared_query(step, *rest):
        plugin.bug_ran()
        return inner(step._replace(slots=torch.where(step.slots < 0, step.slots.max(), step.slots)), *rest)

    ops.prepared_query = prepared_query


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

    from vllm_aiter_mla import startup
    from vllm_aiter_mla.kernels.selfcheck import SelfCheckResult

    os.environ[plugin.MUTATION] = f"{__name__}:{the_check_fails_on_rank_1.__name__}"
    inner = startup.self_check

    def self_check(*given):
        if torch.distributed.get_rank() != 1:
            return inner(*given)
        plugin.bug_ran()
        return SelfCheckResult(False, "self-check FAILED: planted", {}, 0)

    startup.self_check = self_check


def query_and_key_are_swapped() -> None:
    """The op gets the rope part of the key in the first head of the query, and that head's rope part as its key."""
    from vllm_aiter_mla import module

    inner = module._project

    def project(wrapper, hidden_states):
        plugin.bug_ran()
        q, kv_c, k_pe = inner(wrapper, hidden_states)
        rope = k_pe.shape[-1]
        swapped = q.clone()
        swapped[:, 0, -rope:] = k_pe
        return swapped, kv_c, q[:, 0, -rope:]

    module._project = project


def the_op_writes_no_kv_row() -> None:
    """The op prepares the query and leaves the KV cache as it is."""
    from vllm_aiter_mla.kernels import reference

    reference.scatter_rows = lambda cache, slots, rows: plugin.bug_ran()


def raise_when_told():
    """Let every kernel raise once the file exists that the environment names."""
    import os
    from pathlib import Path

    from vllm_aiter_mla import ops

    inner = ops.prepared_query

    def prepared_query(*args):
        if Path(os.environ["AITER_MLA_TEST_TRIGGER"]).exists():
            plugin.bug_ran()
            raise RuntimeError("planted")
        return inner(*args)

    ops.prepared_query = prepared_query


def the_last_decode_row_reads_another_head() -> None:
    """One row of each decode step attends with the query of the next head: the others hide it in a mean."""
    from vllm_aiter_mla import ops

    inner = ops.decode

    def decode(step, q_prepared, output):
        last = step.num_actual_tokens - 1
        if last > 0:
            plugin.bug_ran()
            q_prepared = q_prepared.clone()
            q_prepared[last] = q_prepared[last].roll(1, dims=0)
        inner(step, q_prepared, output)

    ops.decode = decode
