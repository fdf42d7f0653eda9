"""Give vLLM's ``PassConfig`` the plugin's two fields, in place.

In place, not by a subclass: ``CompilationConfig.__repr__`` prints every engine's start-up line from
``vars(PassConfig())`` and breaks when the name is rebound to another class, and an instance must keep pickling under
upstream's name so that a process without the plugin can still read it.

What changes for others: nothing. With both fields at their defaults ``repr``, ``==`` and ``compute_hash`` give what
unmodified vLLM gives, so a run with the flag off shares its compile cache with one that never saw the plugin.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Annotated, Any

from vllm_aiter_mla import fingerprint
from vllm_aiter_mla.compat.patches.patch import Patch
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

_MARK = "_aiter_mla_fields"
_WRAPPED = ("__eq__", "__repr__", "compute_hash")


def extend() -> None:
    """Add the fields that are not there yet, wrap the methods that keep a list of fields, and test the result.

    Applying it twice changes nothing. Raises ``RuntimeError`` with ``PassConfig`` as it was when the test fails.
    """
    from vllm.config import PassConfig

    if _MARK in PassConfig.__dict__:
        return
    vllm_hash = PassConfig().compute_hash()
    added = {name: spec for name, spec in _specs().items() if name not in PassConfig.__dataclass_fields__}
    before = {name: PassConfig.__dict__[name] for name in _WRAPPED}
    for name, (annotation, default) in added.items():
        _add_field(PassConfig, name, annotation, default)
    setattr(PassConfig, _MARK, tuple(added))
    try:
        _rebuild()
        _wrap(PassConfig)
        _self_test(PassConfig, vllm_hash)
    except Exception as error:
        _undo(PassConfig, before)
        raise RuntimeError(f"PassConfig could not be extended: {error}") from error


def values_of(pass_config: object) -> dict[str, object]:
    """The two options as they stand on a ``PassConfig``; ``None`` where it has no such field."""
    return {name: getattr(pass_config, name, None) for name in (FLAG_FIELD, LIMIT_FIELD)}


def _specs() -> dict[str, tuple[Any, Any]]:
    from pydantic import Field, Strict

    # Strict: pydantic would otherwise read "true", 1 and "yes" as a bool and true as the int 1.
    return {
        FLAG_FIELD: (Annotated[bool, Strict()], False),
        LIMIT_FIELD: (Annotated[int, Strict(), Field(gt=0)] | None, None),
    }


def _add_field(cls: type, name: str, annotation: Any, default: Any) -> None:
    # dataclasses has no way to add a field to a finished class: let it make the Field on a throw-away class.
    donor = dataclasses.make_dataclass("_Donor", [(name, annotation, dataclasses.field(default=default))])
    cls.__annotations__[name] = annotation
    cls.__dataclass_fields__[name] = donor.__dataclass_fields__[name]  # type: ignore[attr-defined]
    setattr(cls, name, default)


def _rebuild() -> None:
    """Build the validators anew, innermost first: each holds a copy of the schema of those inside it."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import CompilationConfig, PassConfig, VllmConfig

    for cls in (PassConfig, CompilationConfig, VllmConfig):
        rebuild_dataclass(cls, force=True)  # type: ignore[arg-type]


def _wrap(cls: type) -> None:
    added: tuple[str, ...] = getattr(cls, _MARK)
    vllm_eq, vllm_repr, vllm_hash = (cls.__dict__[name] for name in _WRAPPED)
    cls.__eq__ = _eq(vllm_eq, added)  # type: ignore[assignment]
    cls.__repr__ = _repr(vllm_repr, added)  # type: ignore[assignment]
    cls.compute_hash = _compute_hash(vllm_hash, added)  # type: ignore[attr-defined]


def _eq(vllm_own: Callable[[Any, Any], Any], added: tuple[str, ...]) -> Callable[[Any, object], Any]:
    def eq(self: Any, other: object) -> Any:
        same = vllm_own(self, other)
        if same is not True:
            return same
        return all(getattr(self, name) == getattr(other, name) for name in added)

    return eq


def _repr(vllm_own: Callable[[Any], str], added: tuple[str, ...]) -> Callable[[Any], str]:
    def show(self: Any) -> str:
        text = vllm_own(self)
        ours = ", ".join(f"{name}={getattr(self, name)!r}" for name in _set_fields(self, added))
        return f"{text[:-1]}, {ours})" if ours else text

    return show


def _compute_hash(vllm_own: Callable[[Any], str], added: tuple[str, ...]) -> Callable[[Any], str]:
    def compute_hash(self: Any) -> str:
        """vLLM's own hash; with our fields set, also their values and the plugin's fingerprint."""
        base = vllm_own(_VLLMView(self, added))
        ours = [(name, getattr(self, name)) for name in _set_fields(self, added)]
        if not ours:
            return base
        return hashlib.sha256(repr((base, ours, fingerprint.fingerprint())).encode()).hexdigest()

    return compute_hash


def _set_fields(pass_config: Any, added: tuple[str, ...]) -> list[str]:
    """Those of our fields that do not stand at their default, which lives on the class."""
    return [name for name in added if getattr(pass_config, name) != getattr(type(pass_config), name)]


class _VLLMView:
    """A ``PassConfig`` as unmodified vLLM would list it, so that vLLM's own hash decides what counts."""

    def __init__(self, pass_config: Any, hidden: tuple[str, ...]) -> None:
        self._pass_config = pass_config
        fields = type(pass_config).__dataclass_fields__
        # dataclasses.fields() reads this name from the instance.
        self.__dataclass_fields__ = {name: field for name, field in fields.items() if name not in hidden}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pass_config, name)


def _self_test(cls: type, vllm_hash: str) -> None:
    """Try what the plugin relies on, with the classes as a user will meet them."""
    from vllm.config import CompilationConfig

    _expect(cls().compute_hash() == vllm_hash, "the hash with the flag off has changed")
    values = {FLAG_FIELD: True, LIMIT_FIELD: 8}
    through = CompilationConfig(pass_config=values).pass_config  # type: ignore[arg-type]
    _expect(values_of(through) == values, "values do not survive CompilationConfig")
    _expect(through == cls(**values) and through != cls(), "== does not see the new fields")
    _expect(through.compute_hash() != vllm_hash, "the hash does not see the new fields")
    _expect(FLAG_FIELD in repr(CompilationConfig(pass_config=through)), "repr does not show the new fields")
    for wrong in ({FLAG_FIELD: "true"}, {LIMIT_FIELD: True}, {LIMIT_FIELD: 0}):
        _expect(_rejected(cls, wrong), f"{wrong} is accepted")


def _rejected(cls: type, values: dict[str, Any]) -> bool:
    try:
        cls(**values)
    except ValueError:
        return True
    return False


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _undo(cls: type, before: dict[str, Any]) -> None:
    for name in getattr(cls, _MARK):
        del cls.__annotations__[name]
        del cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        delattr(cls, name)
    for name, value in before.items():
        setattr(cls, name, value)
    delattr(cls, _MARK)
    _rebuild()


PATCH = Patch(
    name="pass_config",
    what="vllm.config.PassConfig gains fuse_aiter_qk_rope_kvcache_mla and aiter_qk_rope_kvcache_fusion_max_token_num",
    why="PassConfig forbids unknown fields, so --compilation-config and -cc.pass_config.* reject the flag",
    how="fields added in place, validators rebuilt, __eq__, __repr__ and compute_hash wrapped",
    link="https://github.com/vllm-project/vllm/pull/41839",
    probe="a self-test right after: values, repr, ==, hash, wrong values; undone when it fails",
    remove_when="upstream has the fields (they are then left alone), or offers pass options to plugins",
    apply=lambda calls: extend(),
    # additional_config still works without it.
    required=False,
)
