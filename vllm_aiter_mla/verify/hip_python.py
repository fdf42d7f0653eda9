# SPDX-License-Identifier: Apache-2.0
"""Find hip-python, AMD's bindings of HIP, or say which release is here, why it cannot be used, and what to install.

Imports no torch: ``check --only machine`` runs without it. Loads no driver: hip-python opens ``libamdhip64`` at the
first call.
"""

from types import ModuleType

from vllm_aiter_mla import packages

CALLS = ("hipGetDeviceCount", "hipGraphDebugDotPrint")
"""What ``verify`` calls."""
ABSENT = "hip-python is not installed"


def find() -> ModuleType | str:
    """Return the module that holds HIP's calls, or why it cannot be used: ``ABSENT``, or the release and what fails."""
    try:
        module = _load()
    except Exception as error:  # an extension for another Python or C library may raise anything
        if version() is None and packages.missing_package(error) == "hip":
            return ABSENT
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        lacking = [name for name in CALLS if not callable(getattr(module, name, None))]
        if not lacking:
            return module
        problem = f"it has no {', '.join(lacking)}"
    return f"hip-python {version() or 'without metadata'} cannot be used: {problem}"


def version() -> str | None:
    """Return the release whose metadata are here, for example "7.2.2.562.43", or None."""
    name_and_version = packages.installed_distribution("hip-python")
    return name_and_version and name_and_version.split()[-1]


def made_for() -> str | None:
    """Return the first number of the ROCm that the release is made for, which is its own first number, or None."""
    return (version() or "").partition(".")[0] or None


def install(rocm: str | None) -> str:
    """Return the command that installs a release for ROCm ``rocm``, for example "7.2.2".

    It never installs the release that is here. Without a pin pip would take the newest for any ROCm.
    """
    wanted = rocm.partition(".")[0] if rocm else "N"
    other = f",!={version()}" if made_for() is not None and wanted in ("N", made_for()) else ""
    return f'pip install "hip-python=={wanted}.*{other}"{"" if rocm else ", with N the first number of your ROCm"}'


def _load() -> ModuleType:
    """Import the module of calls: ``hip.hip`` up to 7; 10 has no module of that name, only the package's attribute."""
    from hip import hip

    return hip
