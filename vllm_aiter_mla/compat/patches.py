# SPDX-License-Identifier: Apache-2.0
"""What this plugin changes in vLLM when it is loaded: three patches, each with its symptom and when it can go.

``PATCHES`` lists them. Each is idempotent. ``apply_all`` never raises: a failure is kept, and the gate skips the engine
because of it. Importing this file imports no vLLM.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Annotated, Any

from vllm_aiter_mla import packages
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

# Of the process, as vLLM's classes are, which the patches change.
_failed: dict[str, str] = {}


def apply_all(gate: Callable[[Any], None], attach: Callable[[Any], None]) -> None:
    """Apply the patches of ``PATCHES``.

    Args:
        gate: takes each ``VllmConfig`` that is built from now on.
        attach: takes each worker that is built from now on.
    """
    operands = {"config_hook": [gate], "worker_hook": [attach]}
    for name, patch in PATCHES.items():
        keep_failure(f"patch {name}", partial(patch, *operands.get(name, ())))


def keep_failure(name: str, step: Callable[[], None]) -> None:
    """Run one step of registration; an exception is kept under ``name`` instead of reaching vLLM."""
    _failed.pop(name, None)
    try:
        step()
    except Exception as error:
        _failed[name] = f"{type(error).__name__}: {error}"


def failures(needed: bool = False) -> dict[str, str]:
    """Return the error of every step that failed, by name; with ``needed`` only of those that the fast path needs.

    Without the fields of ``PassConfig`` additional_config still switches it on.
    """
    return {name: error for name, error in _failed.items() if not needed or name != "patch pass_config"}


# -- the flag's fields on PassConfig

_FIELDS_MARK = "_aiter_mla_fields"
_WRAPPED = ("__eq__", "__repr__", "compute_hash")


def extend_pass_config() -> None:
    """Add the plugin's two fields to vLLM's ``PassConfig``, in place.

    Symptom: PassConfig forbids unknown fields, so --compilation-config and -cc.pass_config.* reject the flag.
    Upstream: https://github.com/vllm-project/vllm/pull/41839
    Remove when: upstream has the fields (they are then left alone), or lets plugins add pass options.

    A subclass would not do: ``CompilationConfig.__repr__`` breaks when the name is rebound, and an instance must keep
    pickling under upstream's name. With both fields at their defaults ``repr``, ``==`` and ``compute_hash`` give what
    unmodified vLLM gives, so a run with the flag off shares its compile cache.

    Raises:
        RuntimeError: the self-test failed; ``PassConfig`` is as it was.
    """
    from vllm.config import PassConfig

    if _FIELDS_MARK in PassConfig.__dict__:
        return
    from pydantic import Field, Strict

    vllm_hash = PassConfig().compute_hash()
    # Strict: pydantic would otherwise read "true", 1 and "yes" as a bool and true as the int 1.
    specs: dict[str, tuple[Any, Any]] = {
        FLAG_FIELD: (Annotated[bool, Strict()], False),
        LIMIT_FIELD: (Annotated[int, Strict(), Field(gt=0)] | None, None),
    }
    added = {name: spec for name, spec in specs.items() if name not in PassConfig.__dataclass_fields__}
    before = {name: PassConfig.__dict__[name] for name in _WRAPPED}
    for name, (annotation, default) in added.items():
        # dataclasses cannot add a field to a finished class: let it make the Field on a throw-away class.
        donor = dataclasses.make_dataclass("_Donor", [(name, annotation, dataclasses.field(default=default))])
        PassConfig.__annotations__[name] = annotation
        PassConfig.__dataclass_fields__[name] = donor.__dataclass_fields__[name]  # type: ignore[attr-defined]
        setattr(PassConfig, name, default)
    setattr(PassConfig, _FIELDS_MARK, tuple(added))
    try:
        _rebuild_validators()
        _wrap_methods(PassConfig, tuple(added))
        _check_patched_pass_config(PassConfig, vllm_hash)
    except Exception as error:
        _undo_pass_config(PassConfig, before)
        raise RuntimeError(f"PassConfig could not be extended: {error}") from error


def pass_config_values(pass_config: object) -> dict[str, object]:
    """Return the two options of a ``PassConfig``; ``None`` for a field that it lacks."""
    return {name: getattr(pass_config, name, None) for name in (FLAG_FIELD, LIMIT_FIELD)}


def _rebuild_validators() -> None:
    """Innermost class first: each validator holds a copy of the schemas inside it."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import CompilationConfig, PassConfig, VllmConfig

    for cls in (PassConfig, CompilationConfig, VllmConfig):
        rebuild_dataclass(cls, force=True)  # type: ignore[arg-type]


def _wrap_methods(cls: type, added: tuple[str, ...]) -> None:
    """Let the methods that keep a list of the fields see ours if they are not at their defaults."""
    vllm_eq, vllm_repr, vllm_hash = (cls.__dict__[name] for name in _WRAPPED)

    def changed(self: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in added if getattr(self, name) != getattr(type(self), name)]

    def eq(self: Any, other: object) -> Any:
        same = vllm_eq(self, other)
        return same if same is not True else all(getattr(self, name) == getattr(other, name) for name in added)

    def show(self: Any) -> str:
        text: str = vllm_repr(self)
        ours = ", ".join(f"{name}={value!r}" for name, value in changed(self))
        return f"{text[:-1]}, {ours})" if ours else text

    def compute_hash(self: Any) -> str:
        """vLLM's own hash; with the flag on, also our fields and the plugin's fingerprint."""
        base: str = vllm_hash(_WithoutFields(self, added))
        ours = changed(self) if getattr(self, FLAG_FIELD) else []
        return hashlib.sha256(repr((base, ours, packages.fingerprint())).encode()).hexdigest() if ours else base

    cls.__eq__, cls.__repr__ = eq, show  # type: ignore[assignment]
    cls.compute_hash = compute_hash  # type: ignore[attr-defined]


class _WithoutFields:
    """A ``PassConfig`` as unmodified vLLM lists it, so that vLLM's own hash decides what counts."""

    def __init__(self, pass_config: Any, hidden: tuple[str, ...]) -> None:
        self._pass_config = pass_config
        fields = type(pass_config).__dataclass_fields__
        # dataclasses.fields() reads this name from the instance.
        self.__dataclass_fields__ = {name: field for name, field in fields.items() if name not in hidden}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pass_config, name)


def _check_patched_pass_config(cls: type, vllm_hash: str) -> None:
    """Try what the plugin relies on, with the classes as a user meets them.

    The hash with the flag on reads every source file of the plugin, and every process runs this: ``look_at_hash``.

    Raises:
        RuntimeError: something of it does not hold.
    """
    from vllm.config import CompilationConfig

    def rejected(wrong: dict[str, Any]) -> bool:
        try:
            cls(**wrong)
        except ValueError:
            return True
        return False

    values = {FLAG_FIELD: True, LIMIT_FIELD: 8}
    through = CompilationConfig(pass_config=values).pass_config  # type: ignore[arg-type]
    wrongs = ({FLAG_FIELD: "true"}, {LIMIT_FIELD: True}, {LIMIT_FIELD: 0})
    checks = {
        "the hash with the flag off has changed": cls().compute_hash() == vllm_hash,
        "values do not survive CompilationConfig": pass_config_values(through) == values,
        "== does not see the new fields": through == cls(**values) and through != cls(),
        "repr does not show the new fields": FLAG_FIELD in repr(CompilationConfig(pass_config=through)),
    } | {f"{wrong} is accepted": rejected(wrong) for wrong in wrongs}
    failed = [what for what, holds in checks.items() if not holds]
    if failed:
        raise RuntimeError("; ".join(failed))


def look_at_hash() -> None:
    """Look whether vLLM's compile cache tells a config with the flag on from one with it off; keep a failure.

    The hash with the flag on reads every source file of the plugin, so only a process with the flag on looks.
    """
    keep_failure("hash of pass_config", _check_hash)


def _check_hash() -> None:
    from vllm.config import PassConfig

    fields = getattr(PassConfig, _FIELDS_MARK, ())
    if FLAG_FIELD in fields and PassConfig(**{FLAG_FIELD: True}).compute_hash() == PassConfig().compute_hash():
        raise RuntimeError(f"PassConfig's hash does not see {FLAG_FIELD}")


def _undo_pass_config(cls: type, before: dict[str, Any]) -> None:
    for name in getattr(cls, _FIELDS_MARK):
        del cls.__annotations__[name]
        del cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        delattr(cls, name)
    for name, value in before.items():
        setattr(cls, name, value)
    delattr(cls, _FIELDS_MARK)
    _rebuild_validators()


# -- the gate, at the end of VllmConfig.__post_init__


def hook_configs(gate: Callable[[Any], None]) -> None:
    """Call ``gate`` for every ``VllmConfig`` that is built, once vLLM has finished it.

    Symptom: vLLM has no plugin hook after it has filled in splitting ops and compile ranges.
    Upstream: https://docs.vllm.ai/en/latest/design/plugin_system/
    Remove when: vLLM calls plugins with each finished VllmConfig.

    vLLM changes neither afterwards. A config that arrives pickled in another process is not built there.
    """
    from vllm.config import VllmConfig

    _call_after(VllmConfig, "__post_init__", gate)


_HOOK_MARK = "_aiter_mla_hook"


def _call_after(cls: type, name: str, then: Callable[[Any], None]) -> None:
    """Call ``then`` with each object of a class of vLLM after one of its methods. Idempotent."""
    inner = getattr(cls, name)
    if getattr(inner, _HOOK_MARK, False):
        return

    @wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        then(self)

    setattr(call, _HOOK_MARK, True)
    setattr(cls, name, call)


# -- two moments in a worker's life

# Of the process, as the patched class is: it is given once, before any worker exists.
_attach: list[Callable[[Any], None]] = []


def hook_loaded_workers(attach: Callable[[Any], None]) -> None:
    """Remember ``attach`` and hook workers if vLLM's worker module is loaded; importing it would cost 0.6 s.

    vLLM loads plugins in the engine core and in each worker after that import. A process that holds both the front end
    and the engine loads them before it; there the gate calls ``hook_workers`` when it engages.
    """
    _attach[:] = [attach]
    if "vllm.v1.worker.worker_base" in sys.modules:
        hook_workers()


def hook_workers() -> None:
    """Wrap ``WorkerBase.__init__`` so that each new worker is handed to ``attach``.

    Symptom: kernels must be checked after loading and counted after warm-up, and vLLM tells plugins of neither.
    Upstream: https://docs.vllm.ai/en/latest/design/plugin_system/
    Remove when: vLLM calls plugins after a worker has loaded its weights and after its warm-up.

    Spawned workers load plugins when their wrapper is half built, so the base class is wrapped.

    Raises:
        IndexError: the plugin was never registered in this process.
    """
    attach = _attach[0]
    from vllm.v1.worker.worker_base import WorkerBase

    _call_after(WorkerBase, "__init__", attach)


def within(worker: Any, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each call of a method of this one worker inside ``context()``."""
    inner = getattr(worker, method)

    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    setattr(worker, method, call)


def after(worker: Any, method: str, then: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call ``then`` after each call of a method of this one worker.

    An exception of ``then`` passes: this function cannot know whether the fast path may go on. If the method raises,
    ``failed`` is called instead, which must not raise.
    """

    @contextmanager
    def followed() -> Iterator[None]:
        try:
            yield
        except Exception:
            failed()
            raise
        then()

    within(worker, method, followed)


PATCHES: dict[str, Callable[..., None]] = {
    "pass_config": extend_pass_config,
    "config_hook": hook_configs,
    "worker_hook": hook_loaded_workers,
}
"""In the order in which they are applied; the error of one that failed is kept as "patch NAME"."""
