"""The vLLM releases this plugin was written against, and the capabilities it looks for before it trusts a number."""

from __future__ import annotations

import re

WINDOW: tuple[tuple[int, int], tuple[int, int]] = ((0, 30), (0, 34))
"""First supported release and first unsupported one: 0.30 <= vLLM < 0.34. The one place that says so."""


def release_of(version: str) -> tuple[int, int] | None:
    """(major, minor) of ``0.32.0+cpu``, ``0.33.1rc1.dev3+gabc`` and the like; ``None`` for "dev" and friends."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def in_window(version: str) -> bool:
    """Whether ``version`` is supported; a version that cannot be read is not, nor is a pre-release of the bound.

    Builds from a shallow checkout call themselves ``0.1.dev1+g...``: they are outside too, and need the user's word.
    """
    release = release_of(version)
    return release is not None and WINDOW[0] <= release < WINDOW[1]


def installed() -> str:
    """vLLM's version as it prints it, e.g. ``0.32.0+cpu``."""
    import vllm

    return str(vllm.__version__)


def missing_capabilities() -> tuple[str, ...]:
    """Names of the config-level things the gate builds on that this vLLM lacks; empty on a supported one."""
    from vllm.config import CompilationConfig
    from vllm.platforms import current_platform

    wanted: dict[str, tuple[object, str]] = {
        f"CompilationConfig.{name}": (CompilationConfig, name) for name in ("_attention_ops",)
    }
    fields = getattr(CompilationConfig, "__dataclass_fields__", {})
    names = ("compile_ranges_endpoints", "inductor_compile_config", "splitting_ops", "use_inductor_graph_partition")
    missing = [f"CompilationConfig.{name}" for name in names if name not in fields]
    for name in ("check_and_update_config", "apply_config_platform_defaults", "pass_key"):
        wanted[f"Platform.{name}"] = (type(current_platform), name)
    missing += [label for label, (owner, name) in wanted.items() if not hasattr(owner, name)]
    return tuple(missing)
