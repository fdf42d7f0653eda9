# SPDX-License-Identifier: Apache-2.0
"""One engine in one worker: what it owns, the moments of its life, and the two boundaries for errors.

vLLM's memory profiling may already capture graphs, so the kernels are checked right after loading. The status counts
layers that have run, so it comes after the compiled graphs have run once.

**Deciding fails closed**, in ``Engine.deciding``: whatever raises before a start knows what every layer runs on takes
the layers concerned to vLLM's own kernels, one ERROR line says so, and strict mode ends the start. **Reporting fails
open**, in ``log.warned``: a file or a correction that fails costs one warning.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import Any

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, ranks
from vllm_aiter_mla.decided import Decision
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.serving import ops
from vllm_aiter_mla.serving.backends import Backends, current_platform
from vllm_aiter_mla.serving.layer import GRAPHS_KEEP, Layer
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError
from vllm_aiter_mla.startup import checks, first_call, prefill, timing
from vllm_aiter_mla.status import skips, status_files
from vllm_aiter_mla.status.engine_status import EngineStatus, LayerState
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import RankStatus, merge_ranks

RELOADS = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods by which vLLM's workers take new weights while they serve."""
ALL_FALL_BACK = "every MLA layer runs vLLM's own kernels"
THESE_FALL_BACK = "the layers concerned run vLLM's own kernels"
SERVING_GOES_ON = "serving goes on"
KERNELS_NOT_CHECKED = "the kernels could not be checked"
LAYER_NOT_CHECKED = "its kernel could not be checked"


def attach(worker: Any) -> "Engine | None":
    """Make the engine of a new worker and hook its moments; without the gate's pass leave the worker as it is.

    Raises:
        SettingsError: the worker cannot be hooked, in strict mode.
    """
    our_pass = compat_config.engaged_pass(worker.vllm_config)
    if our_pass is None:
        return None
    engine = Engine(worker, our_pass)
    # Kernels that nobody has checked do not run, so a worker without hooks runs vLLM's own.
    with engine.deciding("the worker could not be hooked"):
        engine.hook()
    return engine


class Engine:
    """One engine in one worker.

    Args:
        worker: vLLM's.
        our_pass: the gate's decision, in vLLM's slot for a custom pass.

    Attributes:
        settings: the user's options.
        limit: the decode limit in tokens.
        layers: the model's MLA layers, by vLLM's order; empty before the model is loaded.
        names: those of all its MLA layers, also of those that could not be made.
        backends: the kernels. They are made when the model is loaded: a worker has no card before.
        status: what is known of the engine besides what became of its layers.
        strict: whether a failure ends the start; False once the engine serves.
    """

    def __init__(self, worker: Any, our_pass: Any) -> None:
        self.worker, self.our_pass = worker, our_pass
        self.settings, self.limit = our_pass.settings, int(our_pass.limit)
        self.strict = self.settings.strict
        self.layers: list[Layer] = []
        self.names: tuple[str, ...] = ()
        self.backends: Backends | None = None
        self._all_fell_back = ""  # why, once a decision about all layers has raised
        self.status = EngineStatus()

    @property
    def config(self) -> Any:
        """VLLM's ``VllmConfig``."""
        return self.worker.vllm_config

    def hook(self) -> None:
        """Let vLLM's worker call this engine at its moments, and define the ops that its graphs call.

        A worker that starts from a compiled artifact meets the ops there, and runs no pass that would define them.
        """
        ops.register()
        os.environ.setdefault(status_files.RUN_VARIABLE, self.our_pass.run)
        if self.our_pass.integration == "module":
            from vllm_aiter_mla.serving import module  # late: the passes do not need it

            patches.within(self.worker, "load_model", module.installed)
        patches.after(self.worker, "load_model", self.loaded, failed=self.not_loaded)
        for method in RELOADS:
            if hasattr(self.worker, method):
                patches.after(self.worker, method, self.reloaded, failed=partial(self.reloaded, failed=True))
        patches.after(self.worker, "compile_or_warm_up_model", self.warmed_up, failed=self.not_warmed_up)

    # The two boundaries for errors; the second one is ``log.warned``.

    @contextmanager
    def deciding(self, what: str, layers: Sequence[Layer] | None = None) -> Iterator[None]:
        """Surround a decision: if it raises, the layers concerned run vLLM's own kernels, and one line says so.

        Args:
            what: begins the line, such as "the kernels could not be checked".
            layers: those concerned; None for all that the engine has by then.

        Raises:
            SettingsError: in strict mode.
        """
        try:
            yield
        except Exception as error:
            reason = f"{what}: {type(error).__name__}: {error}"
            if layers is None:
                self._all_fell_back = reason
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

    # The model has its weights.

    def loaded(self) -> None:
        """Check every kernel that is about to run, time those that may be chosen, and key the compile cache by it.

        Under the module integration the layers' wrappers then call the op.

        Raises:
            SettingsError: a kernel that would have served fails its check, or one cannot be made, in strict mode.
        """
        self.strict, self.our_pass.key = self.settings.strict, None
        checked_to: int | None = None  # the decode limit, once every kernel is checked

        markers: first_call.FirstCallMarkers | None = None  # once the back ends are built

        def time_kernels() -> None:
            mark_calls = nullcontext if markers is None else markers.mark_all
            timing.time_kernels(self.config, self.settings, self.layers, checked_to, self.worker.rank, mark_calls)

        with _answering(time_kernels), self.deciding(KERNELS_NOT_CHECKED):
            backends = self.make_layers()
            markers = first_call.build_backends(backends, compat_config.cache_folder(), self.worker.rank)
            self.check(markers.mark)
            checked_to = self.limit
        with self.deciding(KERNELS_NOT_CHECKED):
            # Before the first graph is compiled: which layers the passes leave alone depends on it.
            key = self.cache_key()
            if self.our_pass.integration == "module":
                from vllm_aiter_mla.serving import module

                key += module.emit(compat_config.mla_modules(self.config))
            self.our_pass.key = key
        if checked_to is not None:
            for layer in self.layers:
                with log.warned("what vLLM's own attention compiles could not be compiled ahead"):
                    if layer.decision.skip is None:
                        prefill.compile_quantisation(layer)

    def make_layers(self) -> Backends:
        """Make the layers of the model, with a status and back ends that no other engine has; return the back ends."""
        self.layers, self.status = [], EngineStatus()
        modules = compat_config.mla_modules(self.config)
        self.names = tuple(str(getattr(module, "layer_name", name)) for name, module in modules.items())
        backends = self.backends = Backends(self.settings, current_platform())
        for module in modules.values():
            self.layers.append(Layer(module, backends, self.status, self.limit).keep())
        return backends

    def check(
        self, mark_first_calls: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    ) -> None:
        """Compare the kernels of each layer shape with the reference; a layer does not run a kernel that fails.

        Layers whose check cannot be made run vLLM's own kernels, and the others are still checked.

        Args:
            mark_first_calls: returns the context in which the first calls of the named kernel are made.

        Raises:
            SettingsError: a kernel that would have served fails, or anything raises on the way, in strict mode.
        """
        # A draft may have full graphs of one row a request: of the config's sizes as they are.
        listed = self.config.compilation_config.cudagraph_capture_sizes or ()
        captured = {*listed, *compat_config.graph_sizes(self.config).captured}
        sizes = sorted(size for size in captured if size <= self.limit)
        groups: dict[LayerShape, list[Layer]] = {}
        for layer in self.layers:
            with self.deciding(LAYER_NOT_CHECKED, [layer]):
                if layer.facts().skip is None:
                    groups.setdefault(layer.shape(), []).append(layer)
        for shape, group in groups.items():
            with self.deciding(LAYER_NOT_CHECKED, group):
                results = checks.check_kernels(group[0], sizes, mark_first_calls)
                for layer in group:
                    layer.checked(results, shape)
                checks.log_results(group[0], self.end_strict_start)

    def cache_key(self) -> tuple[str, ...]:
        """Return what the layers will run on, or why they will not: a key for the compile cache.

        Raises:
            SettingsError: a layer cannot be asked, in strict mode.
        """
        return tuple(sorted({self._key_of(layer) for layer in self.layers}))

    def _key_of(self, layer: Layer) -> str:
        with self.deciding(LAYER_NOT_CHECKED, [layer]):
            return layer.cache_key()
        return layer.cache_key()  # of a stopped layer: nothing is read

    def not_loaded(self) -> None:
        """Tell the other ranks, which wait for this rank's choice, that its model could not be loaded."""
        _hand_over_in_background(lambda: timing.announce_failed_load(self.config, self.settings))

    # The model has other weights.

    def reloaded(self, failed: bool = False) -> None:
        """Drop what was derived from the weights: no tensor object and no version counter tells that they are others.

        What the layers run on is decided again now, and not in the next step. Layers that fall back, or are engaged
        again, are said and noted; one that cannot be asked stays with vLLM.

        Args:
            failed: the method of the worker has raised. Otherwise nothing is decided in the middle of a weight
                transfer, in which vLLM's layers have no absorbed weight.
        """
        with self.deciding("what follows from the weights could not be renewed"):
            for layer in self.layers:
                layer.reloaded()
            if self.backends is not None:
                self.backends.reloaded()
            if compat_config.is_updating_weights(self.worker) and not failed and any(map(_lacks_weight, self.layers)):
                return
        states = self._layer_states()
        with log.warned("the status could not be corrected"):
            _say_since_reload(*self.status.update(states))

    def _layer_states(self) -> dict[str, LayerState]:
        """Return what became of the layers so far, by name; a layer that cannot be asked runs vLLM's own kernels."""
        for layer in self.layers:
            with self.deciding(LAYER_NOT_CHECKED, [layer]):
                layer.state()
        why = Skip("kernel_shape", self._all_fell_back)
        not_made = LayerState(Decision((), why, ()), skip=why)
        return dict.fromkeys(self.names, not_made) | {layer.name: layer.state() for layer in self.layers}

    # The model has run.

    def warmed_up(self) -> None:
        """Write this rank's status down, then say the line. Whatever a file costs, the line is said, as the last one.

        Raises:
            SettingsError: no layer engaged, or no status line can be made, in strict mode.
        """
        record: RankStatus | None = None
        records: list[RankStatus | None] = []

        def gather() -> None:
            with self.deciding("the status of the other ranks could not be gathered", ()):
                records.extend(ranks.exchange(record)[1])

        try:
            with _answering(gather):
                with self.deciding("the status is not complete", ()):
                    self._run_once()
                with self.deciding("no status line could be made", ()):
                    record = self._make_record()
            if record is not None:
                self._write_down(record, len(records))
                with self.deciding("no status line could be said", ()):
                    self._require_engaged(records, record)
                    self._say(records or [record], record)
        finally:
            self.strict = False

    def _run_once(self) -> None:
        """Run one decode step if no full graph below the limit was captured: nothing else in the warm-up runs a kernel.

        The step holds collectives: every rank of a group has to run it, or none. So the config decides, which all
        share, and not what only one rank knows, for instance that its kernel failed its check.
        """
        sizes = list[int]()
        with suppress(Exception):  # a config that cannot be read is the same on every rank
            sizes = [size for size in compat_config.graph_sizes(self.config).full if size <= self.limit]
        if compat_config.mla_modules(self.config) and not sizes:
            compat_config.run_decode_step(self.worker)

    def _make_record(self) -> RankStatus:
        labels, sizes = compat_config.metric_labels(self.config), compat_config.GraphSizes([], [])
        with log.warned("the captured sizes could not be read"):
            sizes = compat_config.graph_sizes(self.config)
        states = self._layer_states()
        with log.warned("the reasons of skipped layers could not be kept or read"):
            self.status.add_kept_skips(self._keep_skips(self.worker.rank))
        return self.status.make_record(
            states,
            rank=self.worker.rank,
            integration=self.our_pass.integration,
            card=current_platform().arch,
            decode_limit=self.limit,
            kv_cache_dtype=compat_config.cache_name(self.config),
            capture_sizes=sizes.captured,
            full_graphs=sizes.full,
            model_name=labels["model_name"],
            engine=labels["engine"],
            run=status_files.run_name(),
        )

    def _require_engaged(self, records: Sequence[RankStatus | None], record: RankStatus) -> None:
        """End the start of a rank all of whose layers are skipped; one without a layer needs another one that engaged.

        Raises:
            SettingsError: no layer engaged, in strict mode.
        """
        anywhere = any(rank is not None and rank.engaged for rank in records)
        if not record.engaged and (record.total or not anywhere):
            self.end_strict_start(status_line(record))

    def _say(self, records: Sequence[RankStatus | None], record: RankStatus) -> None:
        """Say the line on rank 0, for all ranks of the engine."""
        if record.rank == 0:
            merged = merge_ranks(records)
            level = logging.INFO if merged.engaged and merged.ranks_agree else logging.WARNING
            # Every engine of a process has its line said, also one that reads like the last.
            log.say(level, status_line(*records, replica=compat_config.replica(self.config)))

    def _write_down(self, record: RankStatus, num_ranks: int) -> None:
        """Set the record, which later failures correct, and write its file; what fails costs only a warning."""
        self.status.set_record(record, num_ranks)
        with log.warned("the status file could not be written"):
            self.status.write(compat_config.cache_folder())

    def _keep_skips(self, rank: int) -> dict[str, Skip]:
        """Add why the graphs that were compiled now skip layers to what earlier starts have kept, and return all.

        A reason that the layer itself knows is found again by each start.
        """
        folder, key = compat_config.cache_folder(), str(self.config.compute_hash())
        if not self.status.compiled:
            return skips.read(folder, key, rank)
        called = [layer.name for layer in self.layers if layer.ran or layer.would_run]
        by_graph = {layer.name: layer.graph_skip for layer in self.layers if layer.decision.skip is None}
        skipped = {name: skip for name, skip in by_graph.items() if skip is not None}
        return skips.add(folder, key, rank, skipped, called)

    def not_warmed_up(self) -> None:
        """Tell the other ranks, which wait for this rank's status, that its warm-up has failed.

        The graphs that it has compiled may be loaded by the next start, which then needs the reasons of skipped layers.
        """
        _hand_over_in_background(lambda: ranks.exchange(None))
        with log.warned("the reasons of skipped layers could not be kept or read"):
            self._keep_skips(self.worker.rank)


@contextmanager
def _answering(answer: Callable[[], None]) -> Iterator[None]:
    """Give the other ranks this one's answer after the block, also after an error: they wait for it.

    A signal answers nobody: the others may be waiting in a collective of the block.
    """
    try:
        yield
    except Exception:
        answer()
        raise
    answer()


def _say_since_reload(fell_back: Mapping[str, Skip], again: Sequence[str]) -> None:
    """Say which layers fell back since weights were loaded, one line for each reason, and how many engage again."""
    for reason in dict.fromkeys(fell_back.values()):
        names = [name for name, skip in fell_back.items() if skip == reason]
        since = f"{len(names)} MLA layer(s) run vLLM's own attention since weights were loaded again"
        log.say(logging.ERROR, f"{since}; {GRAPHS_KEEP}: {names[0]}: {reason.reason}")
    if again:
        log.say(logging.INFO, f"{len(again)} MLA layer(s) engage again since weights were loaded")


def _lacks_weight(layer: Layer) -> bool:
    return (skip := layer.not_admitted()) is not None and skip.code == "no_absorbed_weight"


def _hand_over_in_background(hand_over: Callable[[], Any]) -> None:
    """Hand something over to the other ranks after a failure, and do not wait for them.

    vLLM must hear of the failure now, and a rank may wait for another one that has failed.
    """

    def tell() -> None:
        with log.warned("the other ranks could not be told that this one has failed"):
            hand_over()

    Thread(target=tell, daemon=True).start()
