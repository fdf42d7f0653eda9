# SPDX-License-Identifier: Apache-2.0
"""What the plugin does in a worker whose fast path is on: check and time kernels after loading, say the status line.

vLLM's memory profiling may already capture graphs, so the kernels are checked right after loading. The status counts
layers that have run, so it comes after the compiled graphs have run once.

Both fail closed. Whatever goes wrong before every kernel is checked, or before the status line is said, is an error in
strict mode. Otherwise the layers concerned run vLLM's own kernels, one line says so, and the worker goes on.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from vllm_aiter_mla import status
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, ranks
from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.serving.backends import FAMILIES, current_platform
from vllm_aiter_mla.serving.layer import GRAPHS_KEEP, Layer
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError
from vllm_aiter_mla.startup import checks, first_call, timing
from vllm_aiter_mla.startup.checks import step
from vllm_aiter_mla.status.record import RankStatus, Reason

RELOADS = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods by which vLLM's workers take new weights while they serve."""
FALLS_BACK = "every MLA layer runs vLLM's own kernels"
CHECK = "the kernels could not be checked"


def attach(worker: Any) -> None:
    """Hook one worker; with the flag off, or if the gate skipped the engine, leave it as it is.

    Raises:
        SettingsError: the worker cannot be hooked, in strict mode.
    """
    config = worker.vllm_config
    strict = _is_strict(config)
    # Kernels that nobody has checked do not run, so a worker without hooks runs vLLM's own.
    with step("the worker could not be hooked", strict, FALLS_BACK):
        our_pass = compat_config.engaged_pass(config)
        if not compat_config.settings_of(config).enabled or our_pass is None:
            return
        os.environ.setdefault(status.record.RUN, our_pass.run)
        if our_pass.integration == "module":
            from vllm_aiter_mla.serving import module  # late: the passes do not need it

            patches.within(worker, "load_model", module.installed)
        patches.after(worker, "load_model", partial(check_kernels, strict=strict), failed=load_failed)
        for method in RELOADS:
            if hasattr(worker, method):
                patches.after(worker, method, weights_reloaded, failed=partial(weights_reloaded, failed=True))
        patches.after(worker, "compile_or_warm_up_model", partial(take_status, strict=strict), failed=hand_over_nothing)


def check_kernels(worker: Any, strict: bool) -> None:
    """Check every kernel that is about to run, time those that may be chosen, and tell the compile cache the result.

    Under the module integration the layers' wrappers then call the op.

    Raises:
        SettingsError: a kernel fails its check, or one cannot be made, in strict mode.
    """
    config = worker.vllm_config
    layers: list[Layer] = []
    checked_to: int | None = None  # the decode limit, once every kernel is checked
    try:
        with step(CHECK, strict, FALLS_BACK, layers):
            compat_config.engaged_pass(config).status.clear()
            for module in compat_config.mla_modules(config).values():
                layers.append(Layer.of(module))  # those before one that raises are stopped
            limit = int(compat_config.engaged_pass(config).limit)
            sizes = config.compilation_config.cudagraph_capture_sizes or ()
            below = [size for size in sizes if size <= limit]
            marked = _first_calls(worker, layers)
            checks.check_layers(layers, strict=strict, capture_sizes=below, limit=limit, marked=marked)
            checked_to = limit
    finally:
        # Also after an error: the other ranks wait for this one's answer.
        timing.time_kernels(config, layers, checked_to)
    with step(CHECK, strict, FALLS_BACK, layers):
        our_pass = compat_config.engaged_pass(config)
        # Before the first graph is compiled: which layers the passes leave alone depends on it.
        kernels = cache_key(layers, strict=strict)
        if our_pass.integration == "module":
            from vllm_aiter_mla.serving import module

            our_pass.emitted = module.emit(compat_config.mla_modules(config))
        our_pass.kernels = kernels
    if checked_to is not None:
        with log.warned("what vLLM's own attention compiles could not be compiled ahead"):
            for layer in layers:
                if layer.decision.skip is None:
                    _compile_quantisation(layer)


def weights_reloaded(worker: Any, failed: bool = False) -> None:
    """Drop what was derived from the weights: no tensor object and no version counter tells that they are others.

    What the layers run on is decided again now, and not in the next step. Layers that fall back, or are engaged again,
    are said and noted; one that cannot be asked stays with vLLM.

    Args:
        worker: vLLM's.
        failed: the method of the worker has raised. Otherwise nothing is decided in the middle of a weight transfer, in
            which vLLM's layers have no absorbed weight.
    """
    config, layers = worker.vllm_config, list[Layer]()
    with step("what follows from the weights could not be renewed", False, FALLS_BACK, layers):
        for module in compat_config.mla_modules(config).values():
            layers.append(Layer.of(module))  # those before one that raises are stopped
        for layer in layers:
            layer.reloaded()
        for backends in {layer.backends for layer in layers}:
            backends.reloaded()
        if compat_config.is_updating_weights(worker) and not failed and any(map(_lacks_weight, layers)):
            return
    unasked = dict[str, str]()
    for layer in layers:
        with checks.each([layer], False, unasked):
            layer.outcome()  # decides
    checks.say_failed(unasked)
    with log.warned("the status could not be corrected"):
        engine_status = compat_config.engaged_pass(config).status
        fallen, again = engine_status.update(_outcomes(config))
        for code, message in dict.fromkeys(fallen.values()):
            names = [name for name, why in fallen.items() if why == (code, message)]
            since = f"{len(names)} MLA layer(s) run vLLM's own attention since weights were loaded again"
            log.say(logging.ERROR, f"{since}; {GRAPHS_KEEP}: {names[0]}: {code}: {message}")
        if again:
            log.say(logging.INFO, f"{len(again)} MLA layer(s) engage again since weights were loaded")
        engine_status.rewrite()


def _lacks_weight(layer: Layer) -> bool:
    return (skip := layer.not_admitted()) is not None and skip.code == "no_absorbed_weight"


def _outcomes(config: Any) -> dict[str, status.Outcome]:
    """Return what became of the model's MLA layers so far, by name."""
    outcomes = {}
    for name, module in sorted(compat_config.mla_modules(config).items()):
        try:
            outcomes[name] = Layer.of(module).outcome()
        except Exception as error:
            reason = ("not_evaluated", f"the layer cannot be asked: {type(error).__name__}: {error}")
            outcomes[name] = status.Outcome(skip=reason)
    return outcomes


def _first_calls(worker: Any, layers: Sequence[Layer]) -> Callable[[str], AbstractContextManager[None]]:
    """Leave out the kernels in whose first calls an earlier start has died; return what marks those of the others."""
    folder, labels = compat_config.cache_folder(), compat_config.metric_labels(worker.vllm_config)
    engines, paths = {layer.backends for layer in layers}, dict[str, Path]()
    for backends, (family, names) in product(engines, FAMILIES.items()):
        concerned = set(names) & set(backends.names)
        if not concerned or backends.platform.arch == "cpu":
            continue
        path = first_call.path_of(folder, family, backends.platform.arch, labels["engine"], worker.rank)
        reason = first_call.died_before(path) or first_call.why_not_marked(path)
        if reason is None:
            paths |= dict.fromkeys(concerned, path)
            continue
        log.say_once(logging.ERROR, f"{family} is left out: {reason}")
        for name in concerned:
            backends.leave_out(name, reason)

    def marked(name: str) -> AbstractContextManager[None]:
        return first_call.marked(paths[name]) if name in paths else nullcontext()

    for backends in engines:
        for name in backends.names:
            with marked(name):  # AITER's import may build
                backends.get(name)
    return marked


def cache_key(layers: Sequence[Layer], *, strict: bool) -> tuple[str, ...]:
    """Return what the layers will run on, or why they will not: a key for the compile cache.

    Raises:
        SettingsError: a layer cannot be asked, in strict mode.
    """
    keys, failed = set(), dict[str, str]()
    for layer in layers:
        with checks.each([layer], strict, failed):
            keys.add(layer.cache_key())
        if layer.name in failed:
            keys.add(layer.cache_key())  # of a stopped layer: nothing is read
    checks.say_failed(failed)
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


def _is_strict(config: Any) -> bool:
    """Whether strict mode was asked for, read from the options, or from the pass if those cannot be read."""
    for read in (compat_config.settings_of, lambda config: compat_config.engaged_pass(config).settings):
        try:
            return bool(read(config).strict)
        except Exception:
            continue  # what is wrong with this one shows where it is needed
    return False


def take_status(worker: Any, strict: bool) -> None:
    """Say this rank's status line, then write it down. No file is touched before the line is said.

    Raises:
        SettingsError: no layer engaged, or no status line can be made, in strict mode.
    """
    config = worker.vllm_config
    record: RankStatus | None = None
    records: list[RankStatus | None] = []
    try:
        try:
            with step("the status is not complete", strict):
                _run_once(worker)
            with step("no status line could be made", strict):
                record = compat_config.engaged_pass(config).status.record = _record(worker)
        finally:
            # A rank that stops here hands over what it has: the other ranks wait for it.
            with step("the status of the other ranks could not be gathered", strict):
                records = ranks.exchange(record)[1]
        if record is not None:
            with step("no status line could be said", strict):
                _say(config, records or [record], record, strict)
    finally:
        if record is not None:
            _write_down(config, replace(record, ranks=len(records)))


def load_failed(worker: Any) -> None:
    """Tell the other ranks, which wait for this rank's figures, that its model could not be loaded."""
    _tell(lambda: timing.hand_over_nothing(worker.vllm_config))


def hand_over_nothing(worker: Any) -> None:
    """Tell the other ranks, which wait for this rank's status, that its warm-up has failed.

    The graphs that it has compiled may be loaded by the next start, which then needs the reasons of skipped layers.
    """
    _tell(lambda: ranks.exchange(None))
    with log.warned("the reasons of skipped layers could not be kept or read"):
        _keep_skips(worker.vllm_config, worker.rank)


def _keep_skips(config: Any, rank: int) -> dict[str, Reason]:
    """Keep why the graphs that were compiled now left layers out, and return what earlier starts have kept.

    A reason that the layer itself knows is found again by each start.
    """
    layers = [Layer.of(module) for module in compat_config.mla_modules(config).values()]
    called = [layer.name for layer in layers if layer.ran or layer.would_run]
    skipped: dict[str, Reason] | None = None
    if compat_config.engaged_pass(config).status.compiled:
        by_graph = {layer.name: layer.left_out for layer in layers if layer.left_out and layer.decision.skip is None}
        skipped = {name: (skip.code, skip.message) for name, skip in by_graph.items()}
    return status.keep_skips(compat_config.cache_folder(), str(config.compute_hash()), rank, skipped, called)


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
    our_pass, rank = compat_config.engaged_pass(config), worker.rank
    cache, card = compat_config.cache_name(config), current_platform().arch
    record = our_pass.status.record_of(_outcomes(config), our_pass.limit, cache, rank, our_pass.integration, card)
    labels = compat_config.metric_labels(config)
    kept = our_pass.changes is not None and our_pass.changes.partition
    return replace(record, partition=kept, model_name=labels["model_name"], engine=labels["engine"])


def _say(config: Any, records: Sequence[RankStatus | None], record: RankStatus, strict: bool) -> None:
    """Say the line on rank 0, for all ranks of the engine. Strict mode stops a rank whose MLA layers are all skipped.

    Raises:
        SettingsError: strict mode, and no layer engaged.
    """
    anywhere = any(rank is not None and rank.engaged for rank in records)
    if strict and not record.engaged and (record.total or not anywhere):
        raise SettingsError(f"{log.PREFIX}{status.line.of(record)} ({STRICT_OPTION})")
    if record.rank == 0:
        engine = status.record.of_engine(records)
        level = logging.INFO if engine.record.engaged and engine.whole else logging.WARNING
        # Every engine of a process has its line said, also one that reads like the last.
        log.say(level, status.line.of(*records, replica=compat_config.replica(config)))


def _write_down(config: Any, record: RankStatus) -> None:
    """Write the status file; what fails costs a warning and nothing else."""
    with log.warned("the reasons of skipped layers could not be kept or read"):
        record, noted = status.with_kept(record, _keep_skips(config, record.rank))
        if noted is not None and record.rank == 0:
            log.say(logging.INFO, f"noted when these graphs were compiled: {noted}")
    with log.warned("the captured sizes could not be read"):
        record = replace(record, capture_sizes=tuple(compat_config.capture_sizes(config.compilation_config)))
    with log.warned("the status file could not be written"):
        compat_config.engaged_pass(config).status.write(compat_config.cache_folder(), record)
