"""Run the gate at the one moment of ``VllmConfig.__post_init__`` where it can act.

The order there is: ``apply_config_platform_defaults``, mode, optimisation-level defaults, ``check_and_update_config``,
compile ranges, splitting ops. Two methods of the platform class are wrapped:

- the first, to note what the user left alone (by the time of the second the optimisation level has replaced ``None``
  by ``False`` and nothing tells the two apart), and to wrap the second anew where another plugin has wrapped it since;
- the second, to call the gate after the platform's own changes and before ranges and splitting are computed.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla.compat.patches.patch import Patch

_MARK = "_aiter_mla_hook"


@dataclass(frozen=True)
class UserKnobs:
    """What the user gave for the two knobs that decide how the graph is cut; ``None`` where left alone."""

    use_inductor_graph_partition: bool | None
    splitting_ops: tuple[str, ...] | None


_noted: dict[int, tuple[weakref.ref[Any], UserKnobs]] = {}
_nesting = threading.local()


def install(gate: Callable[[Any], None], platform_cls: type | None = None) -> None:
    """Wrap the current platform's class, or ``platform_cls``, so that ``gate`` is called. Twice is harmless.

    Where another plugin has wrapped the method since, it is wrapped once more, and the inner copy of the hook only
    calls on: the gate runs once, after all wrappers, and sees the config as they leave it.
    """
    if platform_cls is None:
        from vllm.platforms import current_platform

        platform_cls = type(current_platform)
    cls = platform_cls

    def prepare(vllm_config: Any) -> None:
        note(vllm_config)
        _wrap(cls, "check_and_update_config", before=_nothing, after=gate)

    _wrap(cls, "apply_config_platform_defaults", before=prepare, after=_nothing)
    _wrap(cls, "check_and_update_config", before=_nothing, after=gate)


def note(vllm_config: Any) -> None:
    """Remember the user's knobs the first time a ``CompilationConfig`` is seen; later passes see filled-in values."""
    compilation = vllm_config.compilation_config
    known = _noted.get(id(compilation))
    if known is None or known[0]() is not compilation:
        key = id(compilation)
        _noted[key] = (weakref.ref(compilation, lambda _: _noted.pop(key, None)), _read_knobs(compilation))


def knobs_of(compilation: Any) -> UserKnobs:
    """What the user gave. A config that was never noted is read as it stands: a filled-in False counts as explicit."""
    known = _noted.get(id(compilation))
    if known is not None and known[0]() is compilation:
        return known[1]
    return _read_knobs(compilation)


def _read_knobs(compilation: Any) -> UserKnobs:
    # Runs for every config, with the flag off too: a vLLM without such a field is refused later, not broken here.
    ops = getattr(compilation, "splitting_ops", None)
    return UserKnobs(getattr(compilation, "use_inductor_graph_partition", None), None if ops is None else tuple(ops))


def _nothing(vllm_config: Any) -> None:
    return None


def _wrap(cls: type, name: str, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    original = inspect.getattr_static(cls, name)
    inner = getattr(original, "__func__", original)
    # The mark points at its own function: functools.wraps in someone else's wrapper copies it, but not the identity.
    if getattr(inner, _MARK, None) is inner:
        return

    def hooked(platform: type, vllm_config: Any) -> None:
        inside_another = getattr(_nesting, "active", False)
        _nesting.active = True
        try:
            if not inside_another:
                before(vllm_config)
            _call(original, platform, vllm_config)
        finally:
            _nesting.active = inside_another
        if not inside_another:
            after(vllm_config)

    hooked.__name__ = name
    setattr(hooked, _MARK, hooked)
    setattr(cls, name, classmethod(hooked))


def _call(method: Any, platform: type, vllm_config: Any) -> None:
    """Call what stood in the class body, whatever kind of method it is, for the class it was looked up on."""
    if isinstance(method, staticmethod):
        method.__func__(vllm_config)
    elif isinstance(method, classmethod):
        method.__func__(platform, vllm_config)
    else:
        method.__get__(None, platform)(vllm_config)


PATCH = Patch(
    name="platform_hook",
    what="apply_config_platform_defaults and check_and_update_config of the current platform's class",
    why="vLLM has no plugin hook between its defaults and the compile ranges",
    how="classmethods wrapped; nested wrappers run the gate once, outermost",
    link="https://docs.vllm.ai/en/latest/design/plugin_system/",
    probe="surface.missing_capabilities() looks for both methods",
    remove_when="vLLM calls plugins while it builds a VllmConfig",
    apply=lambda calls: install(calls.gate),
    required=True,
)
