# SPDX-License-Identifier: Apache-2.0
"""What the plugin does in a worker whose fast path is on: check and time kernels after loading, say the status line.

vLLM's memory profiling may already capture graphs, so the kernels are checked right after loading. The status counts
layers that have run, so it comes after the compiled graphs have run once.

Both fail closed. Whatever goes wrong before every kernel is checked, or before the status line is said, is an error in
strict mode. Otherwise the layers concerned run vLLM's own kernels, one line says so, and the worker goes on.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from threading import Thread
from typing import Any

import torch

from vllm_aiter_mla import status
from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, ranks
from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.serving.backends import AITER_KERNELS, current_platform
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError
from vllm_aiter_mla.startup import first_call, selfcheck, timing
from vllm_aiter_mla.startup.selfcheck import SelfCheckResult
from vllm_aiter_mla.status.record import RankStatus

RELOADS = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods by which vLLM's workers take new weights while they serve."""
PAIRINGS = (False, True)
"""Rotary styles that are checked, as ``is_neox``: a layer's own is known only when its graph is compiled."""
FALLS_BACK = "every MLA layer runs vLLM's own kernels"
CHECK = "the kernels could not be checked"
LAYER_CHECK = "its kernel could not be checked"


def attach(worker: Any) -> None:
    """Hook one worker; with the flag off, or if the gate skipped the engine, leave it as it is.

    Raises:
        SettingsError: the worker cannot be hooked, in strict mode.
    """
    config = worker.vllm_config
    strict = _is_strict(config)
    # Kernels that nobody has checked do not run, so a worker without hooks runs vLLM's own.
    with _step("the worker could not be hooked", strict, FALLS_BACK):
        engaged = compat_config.engaged_pass(config)
        if not compat_config.settings_of(config).enabled or engaged is None:
            return
        if engaged.integration == "module":
            from vllm_aiter_mla.serving import module  # late: the passes do not need it

            patches.within(worker, "load_model", module.installed)
        patches.after(worker, "load_model", partial(check_kernels, strict=strict), failed=load_failed)
        for method in RELOADS:
            if hasattr(worker, method):
                patches.after(worker, method, weights_reloaded)
        patches.after(worker, "compile_or_warm_up_model", partial(take_status, strict=strict), failed=hand_over_nothing)


def check_kernels(worker: Any, strict: bool = False) -> None:
    """Check every kernel that is about to run, time those that may be chosen, and tell the compile cache the result.

    Raises:
        SettingsError: a kernel fails its check, or one cannot be made, in strict mode.
    """
    config = worker.vllm_config
    found: list[Layer] = []
    checked_to: int | None = None  # the decode limit, once every kernel is checked
    try:
        with _step(CHECK, strict, FALLS_BACK, found):
            status.reset()
            found.extend(Layer.of(module) for module in compat_config.mla_modules(config).values())
            limit = int(compat_config.engaged_pass(config).limit)
            sizes = config.compilation_config.cudagraph_capture_sizes or ()
            below = [size for size in sizes if size <= limit]
            with _first_calls_of_aiter(worker, found):
                check_layers(found, strict=strict, capture_sizes=below, limit=limit)
            checked_to = limit
    finally:
        # Also after an error: the other ranks wait for this one's answer.
        timing.choose(config, found, checked_to)
    with _step(CHECK, strict, FALLS_BACK, found):
        engaged = compat_config.engaged_pass(config)
        if engaged.integration == "module":
            from vllm_aiter_mla.serving import module

            engaged.emitted = module.emit(compat_config.mla_modules(config))
        # Before the first graph is compiled: which layers the passes leave alone depends on it.
        engaged.kernels = cache_key(found, strict=strict)
    if checked_to is not None:
        with log.warned("what vLLM's own attention compiles could not be compiled ahead"):
            for layer in found:
                if layer.state == "trusted":
                    _compile_quantisation(layer)


def weights_reloaded(worker: Any) -> None:
    """Drop what was derived from the weights: no tensor object and no version counter tells that they are others."""
    found: list[Layer] = []
    with _step("what follows from the weights could not be renewed", False, FALLS_BACK, found):
        found += [Layer.of(module) for module in compat_config.mla_modules(worker.vllm_config).values()]
        for layer in found:
            layer.reloaded()
        for backends in {id(layer.backends): layer.backends for layer in found}.values():
            backends.reloaded()


@contextmanager
def _first_calls_of_aiter(worker: Any, found: Sequence[Layer]) -> Iterator[None]:
    """Mark the first calls of AITER, and leave it out if an earlier start has died in them."""
    candidates = {id(layer.backends): layer.backends for layer in found}.values()
    concerned = [one for one in candidates if set(AITER_KERNELS) & {*one.names, *one.contenders}]
    if not concerned:
        yield
        return
    labels = compat_config.metric_labels(worker.vllm_config)
    arch, rank = concerned[0].platform.arch, int(getattr(worker, "rank", 0))
    path = first_call.path_of(compat_config.cache_folder(), arch, labels["engine"], rank)
    with ExitStack() as stack:
        reason = first_call.died_before(path)
        try:
            if reason is None:
                stack.enter_context(first_call.marked(path))
        except OSError as error:
            reason = f"not_marked: if it ended the process, the next start would not know: {error}"
        if reason is not None:
            log.say_once(logging.ERROR, f"AITER is left out: {reason}")
            for one, name in product(concerned, AITER_KERNELS):
                one.refuse(name, reason)
        yield


def check_layers(
    found: Sequence[Layer], *, strict: bool, capture_sizes: Sequence[int] = (), limit: int = sys.maxsize
) -> None:
    """Compare the kernels of each layer shape with the reference; a layer does not run a kernel that fails.

    Layers whose check cannot be made run vLLM's own kernels, and the others are still checked.

    Args:
        found: the model's MLA layers.
        strict: whether a kernel that fails its check, or cannot be checked, is an error.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        limit: the decode limit, the largest batch that a kernel will be given.

    Raises:
        SettingsError: a mismatch, or anything that raises on the way, in strict mode.
    """
    failed: dict[str, str] = {}
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in found:
        layer.limit = limit
        with _step(LAYER_CHECK, strict, found=[layer], failed=failed):
            if layer.not_admitted() is not None:
                layer.refuse("it was not admitted when the kernels were checked")
            else:
                groups.setdefault((id(layer.backends), layer.shape()), []).append(layer)
    for group in groups.values():
        with _step(LAYER_CHECK, strict, found=group, failed=failed):
            _check_group(group, strict, capture_sizes)
            for layer in group:
                layer.trust()
    _say_failed(failed)


def _check_group(group: Sequence[Layer], strict: bool, capture_sizes: Sequence[int]) -> None:
    """Check the kernels of layers of one engine and one shape."""
    first, shape = group[0], group[0].shape()
    named = f"heads {shape.heads}, {shape.cache_dtype} cache, block size {shape.block_size}"
    one = synthetic_inputs(replace(shape, device="meta"), tokens=1)
    for name, backend in first.kernels_to_check().items():
        found, tuned = self_check(name, backend, shape, capture_sizes, first.limit), backend.tuned(one)
        if tuned and found.ok:
            status.current().tuned[named] = tuned
        elif tuned:
            log.say_once(logging.WARNING, f"{found.message} ({named}); the tuned tiles {tuned} are left out")
            backend.untune(one)
            found = self_check(name, backend, shape, capture_sizes, first.limit)
        trouble = found.message
        if found.ok and not found.writes_nan:
            continue
        if found.ok:
            trouble, is_named = f"{name} {OVERFLOW}", first.backends.settings.kernel == name
            log.say_once(logging.WARNING if is_named else logging.INFO, f"{trouble}; kernel=auto leaves it out")
            if is_named:
                status.current().overflows.add(name)
                continue
        elif name != first.backends.default:
            # Nobody asked for it by name, and the default kernel still runs: no failure of the engine.
            log.say_once(logging.WARNING, f"{trouble} ({named}); it is not among those that are timed")
        elif strict:
            raise SettingsError(f"{log.PREFIX}{trouble} ({named}; {STRICT_OPTION})")
        else:
            others = f"{'Triton or ' * ('triton' in first.backends.names[1:])}vLLM's own kernels"
            log.say_once(logging.ERROR, f"{trouble} ({named}); this layer shape falls back to {others}")
        for layer in group:
            layer.refuse_kernel(name, trouble)


def self_check(
    name: str, backend: KernelBackend, shape: LayerShape, capture_sizes: Sequence[int] = (), limit: int = sys.maxsize
) -> SelfCheckResult:
    """Run a kernel and the reference, under both pairings; a result that is not ok must not serve this shape.

    A kernel that cannot be compiled or launched is as bad as a wrong one.
    """
    results = []
    try:
        for is_neox in PAIRINGS:
            one = replace(shape, is_neox=is_neox)
            results.append(result := selfcheck.self_check(backend, one, limit))
            if not result.ok:
                return result
            log.say_once(logging.DEBUG, result.message)
            if capture_sizes:
                for large in backend.caches:
                    backend.warm_up(synthetic_inputs(one, tokens=1, large=large), capture_sizes)
    except Exception as error:
        return SelfCheckResult(False, f"{name}: self-check FAILED: {type(error).__name__}: {error}", {}, 0)
    return next((result for result in results if result.writes_nan), results[-1])


def cache_key(found: Sequence[Layer], *, strict: bool = False) -> tuple[str, ...]:
    """Return what the layers will run on, or why they will not: a key for the compile cache.

    Raises:
        SettingsError: a layer cannot be asked, in strict mode.
    """
    keys, failed = set(), dict[str, str]()
    for layer in found:
        with _step(LAYER_CHECK, strict, found=[layer], failed=failed):
            keys.add(layer.cache_key())
        if layer.name in failed:
            keys.add(layer.cache_key())  # of a refused layer: nothing is read
    _say_failed(failed)
    return tuple(sorted(keys))


def _compile_quantisation(layer: Layer) -> None:
    """Let vLLM compile the function with which its own attention quantises a query.

    vLLM compiles it in its warm-up, with decode batches. Those go to our op; without this the first batch that mixes
    prefill and decode rows would compile it while it serves.
    """
    shape = layer.shape()
    if not formats.is_fp8(shape.out_dtype):
        return
    for rows in (2, 1):  # torch compiles separately for one row, and once for all other counts
        absorbed, query = (
            torch.zeros(rows, shape.heads, width, dtype=shape.act, device=shape.device)
            for width in (shape.latent, shape.nope_dim + shape.rope)
        )
        with torch.inference_mode():
            layer.quantise(absorbed, query[..., shape.nope_dim :])


def _say_failed(failed: dict[str, str]) -> None:
    if failed:
        name, reason = next(iter(failed.items()))
        log.say_once(logging.ERROR, f"{len(failed)} MLA layer(s) fall back to vLLM's own kernels: {name}: {reason}")


@contextmanager
def _step(
    what: str,
    strict: bool,
    effect: str = "serving goes on",
    found: Collection[Layer] = (),
    failed: dict[str, str] | None = None,
) -> Iterator[None]:
    """Do something that may raise: an error in strict mode, otherwise one line.

    Args:
        what: what has failed, should it raise.
        strict: whether that stops the worker.
        effect: what happens then in the other mode.
        found: the layers that run vLLM's own kernels from then on.
        failed: takes the reason by layer name instead of the line, which the caller says for all of them.
    """
    try:
        yield
    except Exception as error:
        reason = f"{what}: {type(error).__name__}: {error}"
        for layer in found:
            layer.refuse(reason)
        if strict and isinstance(error, SettingsError):
            raise
        if strict:
            of = "" if failed is None else "".join(f"{layer.name}: " for layer in list(found)[:1])
            raise SettingsError(f"{log.PREFIX}{of}{reason} ({STRICT_OPTION})") from error
        if failed is None:
            log.say_once(logging.ERROR, f"{reason}; {effect}")
        else:
            failed.update((layer.name, reason) for layer in found)


def _is_strict(config: Any) -> bool:
    """Whether strict mode was asked for, read from the options, or from the pass if those cannot be read."""
    for read in (compat_config.settings_of, lambda config: compat_config.engaged_pass(config).settings):
        try:
            return bool(read(config).strict)
        except Exception:
            continue  # what is wrong with this one shows where it is needed
    return False


def take_status(worker: Any, strict: bool = False) -> None:
    """Say this rank's status line, then write it down. No file is touched before the line is said.

    Raises:
        SettingsError: no layer engaged, or no status line can be made, in strict mode.
    """
    config = worker.vllm_config
    record: RankStatus | None = None
    records: list[RankStatus | None] = []
    try:
        try:
            with _step("the status is not complete", strict):
                _run_once(worker)
            with _step("no status line could be made", strict):
                record = _record(worker)
        finally:
            # A rank that stops here hands over what it has: the other ranks wait for it.
            with _step("the status of the other ranks could not be gathered", strict):
                records = ranks.exchange(record)[1]
        if record is not None:
            with _step("no status line could be said", strict):
                _say(config, records or [record], record, strict)
    finally:
        if record is not None:
            _write_down(config, record)


def load_failed(worker: Any) -> None:
    """Tell the other ranks, which wait for this rank's figures, that its model could not be loaded."""
    _tell(lambda: timing.hand_over_nothing(worker.vllm_config))


def hand_over_nothing(worker: Any) -> None:
    """Tell the other ranks, which wait for this rank's status, that its warm-up has failed.

    The graphs that it has compiled may be loaded by the next start, which then needs the reasons of skipped layers.
    """
    _tell(lambda: ranks.exchange(None))
    with log.warned("the reasons of skipped layers could not be kept or read"):
        key, rank = str(worker.vllm_config.compute_hash()), int(getattr(worker, "rank", 0))
        status.keep_skips(compat_config.cache_folder(), key, rank)


def _tell(hand_over: Callable[[], Any]) -> None:
    """Hand something over to the other ranks after a failure, and do not wait for them.

    vLLM must hear of the failure now, and a rank may wait for another one that has failed.
    """
    what = "the other ranks could not be told that this one has failed"

    def tell() -> None:
        with log.warned(what):
            hand_over()

    with log.warned(what):
        Thread(target=tell, daemon=True).start()


def _run_once(worker: Any) -> None:
    """Run one decode step if no full graph below the limit was captured: nothing else in the warm-up runs a kernel.

    The step holds collectives: every rank of a group has to run it, or none. So the config decides, which all
    share, and not what only one rank knows, for instance that its kernel failed its check.
    """
    config, sizes = worker.vllm_config, list[int]()
    with suppress(Exception):  # a config that cannot be read is the same on every rank
        limit = compat_config.engaged_pass(config).limit
        sizes = [size for size in compat_config.full_graphs(config.compilation_config) if size <= limit]
    if compat_config.mla_modules(config) and not sizes:
        compat_config.run_decode_step(worker)


def _record(worker: Any) -> RankStatus:
    config = worker.vllm_config
    engaged, rank = compat_config.engaged_pass(config), int(getattr(worker, "rank", 0))
    names = sorted(compat_config.mla_modules(config))
    cache, card = compat_config.cache_name(config), current_platform().arch
    found = status.record_of(names, engaged.limit, cache, rank, engaged.integration, card)
    labels = compat_config.metric_labels(config)
    kept = engaged.changes is not None and engaged.changes.partition
    return replace(found, partition=kept, model_name=labels["model_name"], engine=labels["engine"])


def _say(config: Any, records: Sequence[RankStatus | None], record: RankStatus, strict: bool) -> None:
    """Say the line on rank 0, for all ranks of the engine. Strict mode stops a rank whose MLA layers are all skipped.

    Raises:
        SettingsError: strict mode, and no layer engaged.
    """
    anywhere = any(one is not None and one.engaged for one in records)
    if strict and not record.engaged and (record.total or not anywhere):
        raise SettingsError(f"{log.PREFIX}{status.line.of(record)} ({STRICT_OPTION})")
    if record.rank == 0:
        found = status.record.of_engine(records)
        level = logging.INFO if found.record.engaged and found.whole else logging.WARNING
        # Every engine of a process has its line said, also one that reads like the last.
        log.say(level, status.line.of(*records, replica=compat_config.replica(config)))


def _write_down(config: Any, record: RankStatus) -> None:
    """Write the status file; what fails costs a warning and nothing else."""
    with log.warned("the reasons of skipped layers could not be kept or read"):
        kept = status.keep_skips(compat_config.cache_folder(), str(config.compute_hash()), record.rank)
        record, noted = status.with_kept(record, kept)
        if noted is not None and record.rank == 0:
            log.say(logging.INFO, f"noted when these graphs were compiled: {noted}")
    with log.warned("the captured sizes could not be read"):
        record = replace(record, capture_sizes=tuple(compat_config.capture_sizes(config.compilation_config)))
    with log.warned("the status file could not be written"):
        status.write(compat_config.cache_folder(), record)
