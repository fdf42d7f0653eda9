# SPDX-License-Identifier: Apache-2.0
"""Find a usable AITER without importing it, then import it and hand out its fused op.

``import aiter`` wants a visible AMD card, runs rocminfo and may start a compiler. So ``locate_aiter`` finds the package
through the import system and reads it as text. ``check --only machine`` runs it without torch, which comes late here.
"""

import ast
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_aiter_mla import packages

OP = "fused_qk_rope_concat_and_cache_mla"
MODULE = "module_cache"  # the extension module that holds the op
REQUIRED = (
    "q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "q_out", "slot_mapping", "k_scale", "q_scale", "positions",
    "cos_cache", "sin_cache", "is_neox", "is_nope_first", "compute_all_q_rope",
)  # fmt: skip
FIRST_GOOD = "0.1.19.post1"  # the first release with ROCm/aiter#4342
INSTALL = f"install amd-aiter {FIRST_GOOD} or newer (PyPI's `aiter` is another project)"

Op = Callable[..., None]


class AiterUnavailableError(RuntimeError):
    """AITER cannot be used in this process; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class AiterInstall:
    """What was found, and why AITER cannot be used."""

    reason: str | None  # one sentence why AITER cannot be used, or None
    package: Path | None = None  # the directory of the ``aiter`` package, or None
    distribution: str | None = None  # name and version of the distribution it belongs to ("amd-aiter 0.1.20"), or None
    signature: tuple[str, ...] = ()  # the op's argument names as its source has them
    # Whether the extension module is already built; if not, the first call compiles it (minutes)
    prebuilt: bool = False


def locate_aiter() -> AiterInstall:
    """Look for AITER on this interpreter's path. Imports nothing, starts nothing, never raises."""
    distribution = packages.installed_distribution(*packages.AITER)
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError, AttributeError) as error:  # a module without a spec, or a broken finder
        reason = f"the package `aiter` cannot be looked up: {type(error).__name__}: {error}"
        return AiterInstall(reason, None, distribution)
    if spec is None:
        broken = f"{distribution} is installed but its package `aiter` is not importable: reinstall it"
        return AiterInstall(broken if distribution else f"AITER is not installed: {INSTALL}", None, distribution)
    if spec.origin is None:
        where = ", ".join(list(spec.submodule_search_locations or [])[:2])
        reason = f"`aiter` is a namespace without __init__.py ({where}): a removed or half-finished install; remove it"
        return AiterInstall(reason, None, distribution)
    package = Path(spec.origin).parent
    signature, problem = _read_signature(package)
    # jit/core.py, get_user_jit_dir(): the variable, else the package, else the home directory.
    places = [os.environ.get("AITER_JIT_DIR"), package / "jit", Path.home() / ".aiter" / "jit"]
    prebuilt = problem is None and any((Path(place) / f"{MODULE}.so").is_file() for place in places if place)
    return AiterInstall(problem, package, distribution, signature, prebuilt)


def _read_signature(package: Path) -> tuple[tuple[str, ...], str | None]:
    source = package / "ops" / "cache.py"
    if not source.is_file():
        if (package / "jit").is_dir() or (package / "ops").is_dir():
            return (), f"{source} is missing: a broken or very old AITER install; {INSTALL}"
        return (), f"{package} is not AMD's AITER but a package of the same name: remove it, then {INSTALL}"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return (), f"{source} cannot be read ({type(error).__name__}: {error}): reinstall AITER"
    found = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == OP), None)
    if found is None:
        return (), f"this AITER has no {OP}: it appeared in 0.1.8; {INSTALL}"
    names = tuple(argument.arg for argument in found.args.args)
    return names, signature_problem(names, len(names) - len(found.args.defaults))


def signature_problem(names: tuple[str, ...], mandatory: int) -> str | None:
    """Return why an op with these arguments cannot be called, or None. The first ``mandatory`` have no default.

    Further arguments with defaults are let through: the self-check sees what they change.
    """
    if "compute_all_q_rope" not in names:
        return f"{OP} has no `compute_all_q_rope`: padded rows would stay unwritten and positions unclamped; {INSTALL}"
    if names[: len(REQUIRED)] != REQUIRED or mandatory > len(REQUIRED):
        return f"{OP} has arguments this version of the plugin does not know: {', '.join(names)}; update the plugin"
    return None


def load_op() -> Op:
    """Import AITER and return its op; check the signature before the import and the schema after it.

    ``torch.ops.aiter.<op>.default`` is what AITER's own Python function calls; taking it directly saves a frame per
    call. Its schema declares every tensor as written, which is why it never enters a compiled graph.

    Raises:
        AiterUnavailableError: absent, of another project, too old, too new, or its import failed.
    """
    import torch

    found = locate_aiter()
    if found.reason is not None:
        raise AiterUnavailableError(found.reason)
    try:
        importlib.import_module("aiter")
        op = getattr(torch.ops.aiter, OP).default
    except Exception as error:  # AITER's import runs rocminfo, compilers and a registry: anything may come out
        raise AiterUnavailableError(f"`import aiter` failed: {type(error).__name__}: {error}") from error
    reason = schema_problem(op)
    if reason is not None:
        raise AiterUnavailableError(reason)
    return op


def schema_problem(op: Any) -> str | None:
    """Return why the registered op cannot be called, or None.

    Another build may be registered than the source that was read: ``inspect.signature`` shows only
    ``(*args, **kwargs)`` of AITER's wrappers, the schema has the names.
    """
    arguments = op._schema.arguments
    mandatory = sum(not argument.has_default_value() for argument in arguments)
    reason = signature_problem(tuple(argument.name for argument in arguments), mandatory)
    if reason is not None:
        return f"the loaded op differs from its source: {reason}"
    tensors = len(REQUIRED) - 3
    known = arguments[: len(REQUIRED)]
    wrong = [a.name for i, a in enumerate(known) if str(a.type) != ("Tensor" if i < tensors else "bool")]
    return f"the loaded op takes other types for: {', '.join(wrong)}" if wrong else None
