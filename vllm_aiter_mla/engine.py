# SPDX-License-Identifier: Apache-2.0
"""One engine in one worker: its state, its hooks in vLLM's worker, and the two boundaries for errors.

vLLM's memory profiling may already capture graphs, so the kernels are checked right after loading. The status counts
layers that have run, so it is made after the compiled graphs have run once.

**Decisions fail closed**, in ``Engine.guard_decision``: if anything raises before the kernel of every layer is known,
the layers concerned run vLLM's own kernels. One ERROR line says so, and strict mode ends the start. **Reports fail
open**, in ``log.warned``: a file or a correction that fails costs one warning.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from vllm_aiter_mla import packages
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, ranks
from vllm_aiter_mla.decided import Decision, LayerState
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.serving import ops
from vllm_aiter_mla.serving.backends import Backends, current_platform
from vllm_aiter_mla.serving.layer import GRAPHS_KEEP, Layer
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError
from vllm_aiter_mla.startup import checks, first_call, prefill, timing
from vllm_aiter_mla.status import liveness, skips
from vllm_aiter_mla.status.engine_status import EngagementChanges, EngineStatus
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import RankRecord, merge_ranks

RELOAD_METHODS = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods by which vLLM's workers take new weights while they serve."""
ALL_FALL_BACK = "every MLA layer runs vLLM's own kernels"
THESE_FALL_BACK = "the layers concerned run vLLM's own kernels"
SERVING_GOES_ON = "serving goes on"
KERNELS_NOT_CHECKED = "the kernels could not be checked"
ENGINES_APART = (
    "no full graph holds a decode batch, and a data-parallel engine has decided otherwise or cannot be asked, so no "
    "decode step is run for the status: it says that nothing has run"
)
LAYER_NOT_CHECKED = "its kernel could not be checked"


def attach(worker: Any) -> "Engine | None":
    """Make the engine of a new worker and hook the worker; without the gate's pass do nothing and return None.

    Raises:
        SettingsError: the worker cannot be hooked, in strict mode.
    """
    our_pass = compat_config.engaged_pass(worker.vllm_config)
    if our_pass is None:
        return None
    engine = Engine(worker, our_pass)
    # Unchecked kernels do not run, so a worker without hooks runs vLLM's own kernels.
    with engine.guard_decision("the worker could not be hooked"):
        engine.hook_worker()
    return engine


class Engine:
    """One engine in one worker.

    Args:
        worker: vLLM's worker.
        our_pass: the pass that the gate has put into vLLM's slot for a custom pass.

    Attributes:
        settings: the user's options.
        limit: the decode limit in tokens.
        layers: the model's MLA layers, in vLLM's order; empty before the model is loaded.
        layer_names: names of all MLA layers of the model, also of layers that could not be made.
        backends: the kernels. They are made after the model is loaded: a worker has no card before.
        status: the status of the engine, from which its record is made.
        strict: whether a failure ends the start; False once the engine serves.
    """

    def __init__(self, worker: Any, our_pass: Any) -> None:
        self.worker, self.our_pass = worker, our_pass
        self.settings, self.limit = our_pass.settings, int(our_pass.limit)
        self.strict = self.settings.strict
        self.layers: list[Layer] = []
        self.layer_names: tuple[str, ...] = ()
        self.backends: Backends | None = None
        # Ranks that have decided otherwise, or nothing; None until they are asked. They wait for each other only after.
        self._apart: list[int] | None = None if worker.vllm_config.parallel_config.world_size > 1 else []
        self._failure_of_all = ""  # why all layers fell back, once a decision about all layers has raised
        self.status = EngineStatus()

    @property
    def config(self) -> Any:
        """VLLM's ``VllmConfig``."""
        return self.worker.vllm_config

    def hook_worker(self) -> None:
        """Make vLLM's worker call this engine after its methods, and define the ops that its graphs call.

        A compiled artifact holds these ops, and a worker that starts from it runs no pass that would define them.
        """
        ops.register()
        os.environ.setdefault(liveness.RUN_VARIABLE, self.our_pass.run)
        if self.our_pass.integration == "module":
            from vllm_aiter_mla.serving import module  # imported here because the passes do not need it

            patches.within(self.worker, "load_model", module.installed)
        patches.after(self.worker, "load_model", self.on_loaded, failed=self.on_load_failed)
        for method in RELOAD_METHODS:
            if hasattr(self.worker, method):
                patches.after(self.worker, method, self.on_reloaded, failed=partial(self.on_reloaded, failed=True))
        patches.after(self.worker, "compile_or_warm_up_model", self.on_warmed_up, failed=self.on_warm_up_failed)
        # Last: a rank that could not be hooked says nothing, and no other one waits for it.
        patches.after(self.worker, "init_device", self.on_device, failed=lambda: None)

    # The two boundaries for errors. The other boundary is ``log.warned``.

    @contextmanager
    def guard_decision(self, failure: str, layers: Sequence[Layer] | None = None) -> Iterator[None]:
        """Guard a decision: if the block raises, the layers concerned run vLLM's own kernels, and one line says so.

        Args:
            failure: begins the line, such as "the kernels could not be checked".
            layers: the layers concerned; None for all layers that the engine has by then.

        Raises:
            SettingsError: in strict mode.
        """
        try:
            yield
        except Exception as error:
            reason = f"{failure}: {type(error).__name__}: {error}"
            if layers is None:
                self._failure_of_all = reason
            for layer in self.layers if layers is None else layers:
                layer.stop(reason)
            if self.strict and isinstance(error, SettingsError):
                raise
            self.end_strict_start(reason, error)
            effect = ALL_FALL_BACK if layers is None else THESE_FALL_BACK if layers else SERVING_GOES_ON
            log.say_once(logging.ERROR, f"{reason}; {effect}")

    def end_strict_start(self, reason: str, cause: Exception | None = None) -> None:
        """End the start of an engine in strict mode; otherwise do nothing.

        Raises:
            SettingsError: in strict mode.
        """
        if self.strict:
            raise SettingsError(f"{log.PREFIX}{reason} ({STRICT_OPTION})") from cause

    # After vLLM's process groups are there.

    def on_device(self) -> None:
        """Ask the other ranks what they have decided. Another node may have other options, variables or packages.

        A rank that has left the engine to vLLM, or could not be hooked, takes part in no exchange. Nobody waits for
        another data-parallel engine.
        """
        parallel = self.config.parallel_config
        with log.warned("the other ranks could not be asked what they have decided"):
            if self._apart is None:
                self._apart = ranks.apart(self._decided, parallel.world_size)
            elif parallel.data_parallel_size > 1:
                ranks.say(self._decided)

    @property
    def _decided(self) -> str:
        """What all ranks must have alike. Another version of the plugin may exchange other records, or elsewhere."""
        return f"{self.settings} limit={self.limit} integration={self.our_pass.integration} {packages.fingerprint()}"

    def _require_agreement(self) -> None:
        if self._apart is None:
            raise RuntimeError("the other ranks were not asked what they have decided")
        if self._apart:
            raise RuntimeError(
                f"rank(s) {', '.join(map(str, self._apart))} have decided otherwise, are without the plugin or came "
                f"{ranks.WAIT_S:.0f} s late: give each node the same options, variables and packages"
            )

    @property
    def _is_agreed(self) -> bool:
        """Whether the ranks may wait for each other."""
        return self._apart == []

    def _answer(self, answer: Callable[[], None]) -> AbstractContextManager[None]:
        """Give the other ranks an answer after a block, if they take part."""
        return _answer_other_ranks(answer) if self._is_agreed else nullcontext()

    # After the model has its weights.

    def on_loaded(self) -> None:
        """Check every kernel that may run, time the candidates, and key the compile cache by the result.

        With the module integration, the layers' wrappers then call the op.

        Raises:
            SettingsError: a kernel that would have served fails its check or cannot be made, in strict mode.
        """
        self.strict, self.our_pass.key = self.settings.strict, None
        checked_limit: int | None = None  # the decode limit, once every kernel is checked
        markers: first_call.FirstCallMarkers | None = None  # set once the back ends are built

        def time_kernels() -> None:
            mark_calls = markers.mark_all if markers else lambda names: nullcontext()
            timing.time_kernels(self.config, self.settings, self.layers, checked_limit, self.worker.rank, mark_calls)

        with self._answer(time_kernels), self.guard_decision(KERNELS_NOT_CHECKED):
            backends = self.make_layers()
            self._require_agreement()
            markers = first_call.build_backends(backends, compat_config.cache_folder(), self.worker.rank)
            self.check_layers(markers.mark)
            checked_limit = self.limit
        with self.guard_decision(KERNELS_NOT_CHECKED):
            # Before the first graph is compiled, because the key also says which layers the passes skip.
            key = self.cache_key()
            if self.our_pass.integration == "module":
                from vllm_aiter_mla.serving import module

                key += module.emit(compat_config.mla_modules(self.config))
            self.our_pass.key = key
        if checked_limit is not None:
            self._compile_ahead()

    def _compile_ahead(self) -> None:
        """Compile what vLLM's own attention runs in batches with prefill rows, which no warm-up has."""
        done = set[LayerShape]()
        for layer in self.layers:
            with log.warned("what vLLM's own attention compiles could not be compiled ahead"):
                if layer.decision.skip is None:
                    prefill.compile_quantisation(layer)
                    if layer.shape() not in done:
                        prefill.compile_product(layer, self._captured_sizes)
                        done.add(layer.shape())

    def _captured_sizes(self) -> list[int]:
        """Return the sizes of captured graphs within the limit.

        A draft may have full graphs of one row a request. These have the sizes of the config without rounding.
        """
        config_sizes = self.config.compilation_config.cudagraph_capture_sizes or ()
        captured_sizes = {*config_sizes, *compat_config.graph_sizes(self.config).captured}
        return sorted(size for size in captured_sizes if size <= self.limit)

    def make_layers(self) -> Backends:
        """Make the layers of the model, with a new status and new back ends; return the back ends."""
        self.layers, self.status = [], EngineStatus()
        modules = compat_config.mla_modules(self.config)
        self.layer_names = tuple(str(getattr(module, "layer_name", name)) for name, module in modules.items())
        backends = self.backends = Backends(self.settings, current_platform())
        block_size: int | None = None
        with log.warned("the block size that vLLM will set could not be asked"):
            block_size = compat_config.final_block_size(self.config)
        for module in modules.values():
            self.layers.append(Layer(module, backends, self.status, self.limit, block_size).keep())
        return backends

    def check_layers(
        self, mark_first_calls: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    ) -> None:
        """Compare the kernels of each layer shape with the reference; a layer does not run a kernel that fails.

        If the check of a layer raises, that layer runs vLLM's own kernels, and the other layers are still checked.

        Args:
            mark_first_calls: returns the context in which the first calls of the named kernel are made.

        Raises:
            SettingsError: a kernel that would have served fails, or a check raises, in strict mode.
        """
        sizes = self._captured_sizes()
        groups: dict[LayerShape, list[Layer]] = {}
        for layer in self.layers:
            with self.guard_decision(LAYER_NOT_CHECKED, [layer]):
                if layer.facts().skip is None:
                    groups.setdefault(layer.shape(), []).append(layer)
        for shape, group in groups.items():
            with self.guard_decision(LAYER_NOT_CHECKED, group):
                results = checks.check_kernels(group[0], sizes, mark_first_calls)
                for layer in group:
                    layer.checked(results, shape)
                checks.log_results(group[0], self.end_strict_start)

    def cache_key(self) -> tuple[str, ...]:
        """Return a key for the compile cache: which kernel each layer will run, or why it is skipped.

        Raises:
            SettingsError: the decision about a layer raises, in strict mode.
        """
        return tuple(sorted({self._layer_key(layer) for layer in self.layers}))

    def _layer_key(self, layer: Layer) -> str:
        with self.guard_decision(LAYER_NOT_CHECKED, [layer]):
            return layer.cache_key()
        return layer.cache_key()  # the layer is stopped by now, so its key reads nothing that may raise

    def on_load_failed(self) -> None:
        """Tell the other ranks, which wait for this rank's choice, that its model could not be loaded."""
        if self._is_agreed:
            _notify_in_background(lambda: timing.announce_failed_load(self.config, self.settings))

    # After the model has other weights.

    def on_reloaded(self, failed: bool = False) -> None:
        """Drop what was derived from the weights: no tensor object and no version counter shows that they have changed.

        Decide now on the kernel of each layer, and not in the next step. Log layers that fall back or are engaged
        again, and correct the status. If the decision about a layer raises, the layer runs vLLM's own kernels.

        Args:
            failed: whether the method of the worker has raised. Otherwise nothing is decided during a weight transfer,
                in which vLLM's layers have no absorbed weight.
        """
        with self.guard_decision("what follows from the weights could not be renewed"):
            for layer in self.layers:
                layer.reloaded()
            if self.backends is not None:
                self.backends.reloaded()
            is_transferring = compat_config.is_updating_weights(self.worker) and not failed
            if is_transferring and any(map(_lacks_absorbed_weight, self.layers)):
                return
        states = self._layer_states()
        with log.warned("the status could not be corrected"):
            _log_changes_by_reload(self.status.update(states))

    def _layer_states(self) -> dict[str, LayerState]:
        """Return the states of the layers by name. If a decision raises, its layer runs vLLM's own kernels."""
        for layer in self.layers:
            with self.guard_decision(LAYER_NOT_CHECKED, [layer]):
                layer.state()
        skip = Skip("kernel_shape", self._failure_of_all)
        missing_layer = LayerState(Decision((), skip, ()), skip=skip)  # of a layer that could not be made
        return dict.fromkeys(self.layer_names, missing_layer) | {layer.name: layer.state() for layer in self.layers}

    # After the model has run.

    def on_warmed_up(self) -> None:
        """Write this rank's status file, then log the status line last. A file that fails does not stop the line.

        Raises:
            SettingsError: no layer engaged, or no status line can be made, in strict mode.
        """
        record: RankRecord | None = None
        records: list[RankRecord | None] = []

        def gather() -> None:
            with self.guard_decision("the status of the other ranks could not be gathered", ()):
                records.extend(ranks.exchange(record)[1])

        try:
            self._compile_ahead()  # elastic expert parallelism has dropped it; else torch has all of it
            with self._answer(gather):
                with self.guard_decision("the status is not complete", ()):
                    self._run_decode_step()
                with self.guard_decision("no status line could be made", ()):
                    record = self._make_record()
            if record is not None:
                num_ranks = len(records)  # 0 if they could not be gathered
                record = replace(record, num_ranks=num_ranks)
                records = [None if each is None else replace(each, num_ranks=num_ranks) for each in records]
                self._write_record(record)
                with self.guard_decision("no status line could be said", ()):
                    self._require_engaged_layer(records, record)
                    self._say_status_line(records or [record], record)
        finally:
            self.strict = False

    def _run_decode_step(self) -> None:
        """Run one decode step if no full graph below the limit was captured: nothing else in the warm-up runs a kernel.

        The step contains collectives, so either every rank of a group runs the step, or no rank. All ranks share the
        config, so the config decides. A fact of one rank does not, for instance that a kernel failed its check there.
        The step waits for every data-parallel engine, which may have decided otherwise on another node.
        """
        sizes = list[int]()
        with suppress(Exception):  # a config that cannot be read is the same on every rank
            sizes = [size for size in compat_config.graph_sizes(self.config).full if size <= self.limit]
        if compat_config.mla_modules(self.config) and not sizes and self._is_agreed and self._are_engines_agreed():
            compat_config.run_decode_step(self.worker)

    def _are_engines_agreed(self) -> bool:
        """Return whether every data-parallel engine has decided the same.

        By the time of the warm-up each of them has left its word: the profiling before it waits for all of them. With
        elastic expert parallelism torch's store is not one for all.
        """
        parallel = self.config.parallel_config
        if parallel.data_parallel_size == 1:
            return True
        if parallel.enable_elastic_ep or not ranks.all_say(self._decided):
            log.say_once(logging.WARNING, ENGINES_APART)
            return False
        return True

    def _make_record(self) -> RankRecord:
        labels, sizes = compat_config.metric_labels(self.config), compat_config.GraphSizes([], [])
        with log.warned("the captured sizes could not be read"):
            sizes = compat_config.graph_sizes(self.config)
        states = self._layer_states()
        with log.warned("the reasons of skipped layers could not be kept or read"):
            self.status.add_kept_skips(self._keep_skips(self.worker.rank))
        base = RankRecord(
            rank=self.worker.rank,
            integration=self.our_pass.integration,
            card=current_platform().arch,
            decode_limit=self.limit,
            kv_cache_dtype=compat_config.cache_name(self.config),
            capture_sizes=tuple(sizes.captured),
            full_graphs=tuple(sizes.full),
            model_name=labels["model_name"],
            dp_index=labels["engine"],
            run=liveness.ensure_run_name(),
            engine_id=compat_config.engine_id(self.config),
        )
        return self.status.make_record(states, base)

    def _require_engaged_layer(self, records: Sequence[RankRecord | None], record: RankRecord) -> None:
        """End the start if all layers of this rank are skipped, or if it has no layer and no other rank engages one.

        Raises:
            SettingsError: no layer engaged, in strict mode.
        """
        is_any_rank_engaged = any(rank is not None and rank.engaged for rank in records)
        if not record.engaged and (record.num_layers or not is_any_rank_engaged):
            self.end_strict_start(status_line(record))

    def _say_status_line(self, records: Sequence[RankRecord | None], record: RankRecord) -> None:
        """Log the status line on rank 0, for all ranks of the engine."""
        if record.rank == 0:
            merged = merge_ranks(records)
            level = logging.INFO if merged.engaged and merged.ranks_agree else logging.WARNING
            # Each engine of a process gets a line, even if the line equals that of the last engine.
            log.say(level, status_line(*records, dp_index=compat_config.replica(self.config)))

    def _write_record(self, record: RankRecord) -> None:
        """Set the record, which later failures correct, and write its file; a failed write costs only a warning.

        With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` a front end may drop its engine and live on. So the lock of this rank
        lives as long as the worker.
        """
        self.status.set_record(record)
        with log.warned("the status file could not be written"):
            weakref.finalize(self.worker, self.status.close).atexit = False
            self.status.write(compat_config.cache_folder())

    def _keep_skips(self, rank: int) -> dict[str, Skip]:
        """Add the reasons of the graphs that this start compiled to the kept reasons, and return all of them.

        Only reasons of graphs are kept, because each start finds the reasons of the layers again.
        """
        folder, key = compat_config.cache_folder(), str(self.config.compute_hash())
        if not self.status.pass_counts:
            return skips.read(folder, key, rank)
        called_layers = [layer.name for layer in self.layers if layer.ran_kernel or layer.possible_kernels]
        graph_skips = {layer.name: layer.graph_skip for layer in self.layers if layer.decision.skip is None}
        skipped = {name: skip for name, skip in graph_skips.items() if skip is not None}
        return skips.add(folder, key, rank, skipped, called_layers)

    def on_warm_up_failed(self) -> None:
        """Tell the other ranks, which wait for this rank's status, that its warm-up has failed.

        The next start may load the graphs that this rank has compiled, and then needs the reasons of skipped layers.
        """
        if self._is_agreed:
            _notify_in_background(lambda: ranks.exchange(None))
        with log.warned("the reasons of skipped layers could not be kept or read"):
            self._keep_skips(self.worker.rank)


@contextmanager
def _answer_other_ranks(answer: Callable[[], None]) -> Iterator[None]:
    """Give the other ranks this rank's answer after the block, also after an error: they wait for the answer.

    After a signal there is no answer: the other ranks may be waiting in a collective of the block.
    """
    try:
        yield
    except Exception:
        answer()
        raise
    answer()


def _log_changes_by_reload(changes: EngagementChanges) -> None:
    """Log which layers fell back after a reload, with one line for each reason, and how many are engaged again."""
    for reload_skip in dict.fromkeys(changes.fell_back.values()):
        names = [name for name, skip in changes.fell_back.items() if skip == reload_skip]
        effect = f"{len(names)} MLA layer(s) run vLLM's own attention since weights were loaded again"
        log.say(logging.ERROR, f"{effect}; {GRAPHS_KEEP}: {names[0]}: {reload_skip.reason}")
    if changes.reengaged:
        log.say(logging.INFO, f"{len(changes.reengaged)} MLA layer(s) engage again since weights were loaded")


def _lacks_absorbed_weight(layer: Layer) -> bool:
    return (skip := layer.not_admitted()) is not None and skip.code == "no_absorbed_weight"


def _notify_in_background(notify: Callable[[], Any]) -> None:
    """Notify the other ranks of a failure, and do not wait for them.

    vLLM must see the failure now, and a rank may be waiting for another rank that has failed.
    """

    def notify_or_warn() -> None:
        with log.warned("the other ranks could not be told that this one has failed"):
            notify()

    Thread(target=notify_or_warn, daemon=True).start()
