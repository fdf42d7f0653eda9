# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine, its packages and vLLM's variables.

The name of a check is that of its function without "check_".
"""

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vllm_aiter_mla import files, locks, packages
from vllm_aiter_mla.admission import ABORTED, REMEDIES
from vllm_aiter_mla.commands.cards import ARCHITECTURES, product_names
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.kernels.aiter import op
from vllm_aiter_mla.settings import NAMESPACE
from vllm_aiter_mla.status.line import not_measured_note
from vllm_aiter_mla.verify import hip_python as bindings

CheckStatus = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    # "warning": it works, but look at it. "problem": the fast path will not engage, or not work.
    status: CheckStatus
    detail: str  # the finding, with the figures
    remedy: str = ""  # what to do; empty if there is nothing to do
    name: str = ""  # of the check; ``run_checks`` sets it


Environment = Mapping[str, str]
"""The environment of a server: the value of each variable."""
CheckFunction = Callable[[Environment], CheckResult]

MIN_ROCM_MAJOR = 7
# Tests replace these paths.
ROCM_VERSION = Path("/opt/rocm/.info/version")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
CONDITIONS = f"the fast path needs ROCm {MIN_ROCM_MAJOR} or newer and a card of {' or '.join(ARCHITECTURES)}"
SEE_GPU = "see the line `gpu`"
SEE_VLLM = "see the line `vllm`"
NO_VLLM = CheckResult("unknown", "vLLM is not installed", SEE_VLLM)
VERIFIED = Path(__file__).with_name("verified.json")  # evidence by release line of each package
GENERAL_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP = "vllm.general_plugins", "vllm.platform_plugins"
SWITCHES = {
    vllm_options.USE_AITER: (True, False),
    vllm_options.USE_AITER_MLA: (True, True),
    vllm_options.BATCH_INVARIANT: (False, False),
    vllm_options.NO_MLA: (False, False),
}
"""vLLM's switches: the value that the fast path needs, and the default in all supported releases (vllm/envs.py)."""


def check_torch(environment: Environment) -> CheckResult:
    """Check that torch is installed and built for ROCm."""
    try:
        module = import_module("torch")
    except Exception as error:
        return CheckResult("problem", f"not importable: {error}", "install the ROCm build of torch; vLLM needs it too")
    built_for = installed_device().built_for
    if built_for.startswith("ROCm"):
        return CheckResult("ok", f"{module.__version__} for {built_for}")
    build_text = f"for {built_for}" if built_for else "a CPU build"
    if gpu_arch() is not None:
        detail = f"{module.__version__}, {build_text}: the fast path needs ROCm"
        return CheckResult("problem", detail, "use the ROCm build of torch")
    return CheckResult("warning", f"{module.__version__}, {build_text}: the plan and tests run, nothing else", SEE_GPU)


def check_rocm(environment: Environment) -> CheckResult:
    """Check the ROCm release that torch was built for, or else the installed one."""
    version = rocm_version()
    if version is None:
        return CheckResult("unknown", "no ROCm is visible here", SEE_GPU)
    if int(version.partition(".")[0]) >= MIN_ROCM_MAJOR:
        return CheckResult("ok", version)
    return CheckResult("problem", f"{version}: AITER's bf16 arithmetic is wrong before 7", "use ROCm 7 or newer")


def check_gpu(environment: Environment) -> CheckResult:
    """Check the card's architecture."""
    arch = gpu_arch()
    if arch is None:
        return CheckResult("unknown", f"no GPU is visible here (platform): {CONDITIONS}", REMEDIES["platform"])
    if arch in ARCHITECTURES:
        return CheckResult("ok", f"{arch} ({product_names(arch)}){not_measured_note(arch)}")
    if arch.startswith("gfx"):
        return CheckResult("problem", f"{arch} (platform): {CONDITIONS}", REMEDIES["platform"])
    return CheckResult("problem", f"{arch} (platform): not an AMD card, and {CONDITIONS}", REMEDIES["platform"])


def check_triton(environment: Environment) -> CheckResult:
    """Check that Triton is installed. With an fp8 KV cache ``kernel=auto`` runs none of our other kernels."""
    try:
        return CheckResult("ok", f"triton {import_module('triton').__version__}")
    except Exception as error:
        if packages.missing_package(error) == "triton":
            problem, remedy = "not installed", "install the Triton that belongs to your torch"
        else:
            problem, remedy = f"cannot be imported: {error}", "reinstall the Triton that belongs to your torch"
    return CheckResult(
        "warning",
        f"{problem}: kernel=triton is not available, so none of our kernels runs with an fp8 KV cache",
        remedy,
    )


def check_hip_python(environment: Environment) -> CheckResult:
    """Check that hip-python works and is made for this ROCm. Only the step ``kernels`` needs it."""
    module_or_problem, version, rocm = bindings.find(), bindings.version(), rocm_version()
    if module_or_problem == bindings.ABSENT and rocm is None:
        return CheckResult("ok", "not installed, and not needed without ROCm")
    if isinstance(module_or_problem, str):
        return CheckResult("warning", f"{module_or_problem}: the step kernels checks less", bindings.install(rocm))
    if rocm is not None and version is not None and rocm.partition(".")[0] != bindings.made_for():
        detail = f"hip-python {version} is made for ROCm {bindings.made_for()}, and this is ROCm {rocm}"
        return CheckResult("warning", detail, bindings.install(rocm))
    return CheckResult("ok", f"hip-python {version or 'without metadata'}")


def check_vllm(environment: Environment) -> CheckResult:
    """Check that vLLM's version is supported, without importing vLLM."""
    version = vllm_version()
    window_text = "{}.{} <= vLLM < {}.{}".format(*release.WINDOW[0], *release.WINDOW[1])
    if version is None:
        return CheckResult("problem", "vLLM is not installed", f"install vLLM for ROCm, {window_text}")
    if release.in_window(version):
        return CheckResult("ok", f"{version}, inside {window_text}")
    return CheckResult("problem", f"{version} is outside {window_text}: the plugin stays off", REMEDIES["vllm_version"])


def check_plugin(environment: Environment) -> CheckResult:
    """Check that vLLM finds this plugin. ``VLLM_PLUGINS`` is an allow-list: if it is set, it must name the plugin."""
    entry_points = importlib.metadata.entry_points(group=GENERAL_PLUGINS_GROUP)
    own_targets = {point.value for point in entry_points if point.name == NAMESPACE}
    other_plugins = {point.name for point in entry_points if point.name != NAMESPACE and _package_name(point) != "vllm"}
    others_text = f"; other plugins: {', '.join(sorted(other_plugins))}" if other_plugins else ""
    if not own_targets:
        return CheckResult(
            "problem",
            f"no entry point {NAMESPACE} in {GENERAL_PLUGINS_GROUP}{others_text}",
            "in a checkout: pip install .",
        )
    if len(own_targets) > 1:
        return CheckResult("warning", f"{NAMESPACE} is registered more than once", "remove all but one installation")
    if (reason := vllm_options.unloaded_plugin_reason(environment)) is not None:
        return CheckResult("problem", reason, vllm_options.PLUGIN_REMEDY)
    return CheckResult("ok", f"entry point {NAMESPACE} = {own_targets.pop()}{others_text}")


def check_surface(environment: Environment) -> CheckResult:
    """Check that vLLM has the hooks that the plugin needs, and that its MLA ops have the expected arguments."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla.compat.layer import missing_names

    missing_hooks = (*release.missing_capabilities(), *missing_names())
    differences = (*release.op_differences(fused=False), *release.op_differences(fused=True))
    if missing_hooks or differences:
        problem = "; ".join([*(f"this vLLM lacks {name}" for name in missing_hooks), *differences])
        return CheckResult(
            "problem", f"{problem}: the plugin stays off", REMEDIES["capability" if missing_hooks else "op_schema"]
        )
    return CheckResult("ok", "vLLM has every hook that the plugin needs, and the MLA ops that it knows")


def check_patches(environment: Environment) -> CheckResult:
    """Apply the plugin's patches and define its ops, as a server does."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla import plugin as our_plugin
    from vllm_aiter_mla.compat import patches
    from vllm_aiter_mla.gate import define_ops

    our_plugin.register()
    define_ops()
    patches.look_at_hash()
    failures = patches.failures()
    if not failures:
        return CheckResult("ok", ", ".join(patches.PATCHES))
    failure_texts = "; ".join(f"{name}: {error}" for name, error in failures.items())
    if patches.failures(needed=True):
        return CheckResult("problem", f"{failure_texts}: vLLM runs unmodified", f"{SEE_VLLM}; report it with this line")
    return CheckResult("warning", failure_texts, "use additional_config.aiter_mla instead of the flag")


def check_aiter(environment: Environment) -> CheckResult:
    """Check AITER by its files, without importing it."""
    install = op.locate_aiter()
    if install.reason is not None:
        if install.package is None and install.distribution is None and rocm_version() is None:
            return CheckResult("unknown", f"{install.reason}; no ROCm is here either", SEE_GPU)
        return CheckResult("problem", f"kernel_unavailable: {install.reason}", REMEDIES["kernel_unavailable"])
    detail = f"{install.distribution or 'without metadata'}, {len(install.signature)} arguments"
    if install.prebuilt:
        return CheckResult("ok", f"{detail}, built")
    detail += "; module_cache is not built: the first start compiles it, which takes minutes"
    return CheckResult("warning", detail, "nothing; expect a slow first start")


def check_code_objects(environment: Environment) -> CheckResult:
    """Check that compiled modules of vLLM and AITER with AMD code have code for this card."""
    arch = gpu_arch()
    if arch is None or not arch.startswith("gfx"):
        return CheckResult("unknown", "no AMD card is visible here", SEE_GPU)
    architectures_by_module = {path: architectures_of(path) for path in compiled_modules()}
    modules_with_code = {path: archs for path, archs in architectures_by_module.items() if archs}
    if not modules_with_code:  # a CPU build, or a compressed bundle
        return CheckResult(
            "unknown", f"no AMD code can be seen in {len(architectures_by_module)} modules of vLLM and AITER", SEE_VLLM
        )
    lacking_modules = [path.name for path, archs in modules_with_code.items() if arch not in archs]
    if lacking_modules:
        problem = f"no code for {arch} in {', '.join(lacking_modules)}"
        return CheckResult("problem", problem, "install builds for this card")
    return CheckResult("ok", f"{len(modules_with_code)} modules hold code for {arch}")


def compiled_modules() -> list[Path]:
    """Return the paths of vLLM's shared objects and of AITER's built modules."""
    module_paths: list[Path] = []
    for package, pattern in (("vllm", "*.so"), ("aiter", "jit/*.so")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            module_paths += sorted(Path(spec.origin).parent.glob(pattern))
    return module_paths


def architectures_of(path: Path) -> set[str]:
    """Return the AMD architectures for which a shared object has code, by the names in its bundle."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name.decode() for name in re.findall(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)", content)}


def check_verified(environment: Environment) -> CheckResult:
    """Check whether this project has run the releases here. Without a card it has run no ROCm and no AITER."""
    installed_versions = {
        "vLLM": vllm_version(),
        "torch": packages.installed_distribution("torch"),
        "Python": platform.python_version(),
        "ROCm": rocm_version(),
        "AITER": packages.installed_distribution(*packages.AITER),
    }
    release_lines = {
        name: ".".join(version.split()[-1].split(".")[:2])
        for name, version in installed_versions.items()
        if version is not None
    }
    evidence = files.load(VERIFIED)
    untested = [f"{name} {line}" for name, line in release_lines.items() if line not in evidence[name]]
    if untested:
        finding = f"never run by this project: {', '.join(untested)}"
        return CheckResult("warning", finding, "run `vllm-aiter-mla check` where you serve")
    return CheckResult(
        "ok", "; ".join(f"{name} {line}: {evidence[name][line]}" for name, line in release_lines.items())
    )


def check_atom(environment: Environment) -> CheckResult:
    """Check that ATOM's platform plugin, which replaces the models, is absent or off."""
    if not any(
        _package_name(point) == "atom" for point in importlib.metadata.entry_points(group=PLATFORM_PLUGINS_GROUP)
    ):
        return CheckResult("ok", "ATOM's vLLM plugin is not installed")
    if environment.get("ATOM_DISABLE_VLLM_PLUGIN") == "1":
        return CheckResult("ok", "installed and switched off by ATOM_DISABLE_VLLM_PLUGIN=1")
    return CheckResult("problem", "ATOM's plugin owns the model: this plugin stays off", REMEDIES["atom"])


def check_cache_root(environment: Environment) -> CheckResult:
    """Check that a start can note the first call of a kernel, and that no earlier start has ended in one."""
    folder = files.cache_folder(environment)
    # A link that leads nowhere, or a file, is where the start would make its folder, too.
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(prefix="check-", dir=there) as name:
            lock = Path(name, "lock")
            if not locks.try_hold(lock) or not locks.is_held(lock):
                raise OSError("a lock was taken, and cannot be seen as held")
            locks.release(lock)
    except OSError as error:
        detail = f"not_marked: {there} takes no file or no lock ({error}), so a start leaves AITER and Triton out"
        return CheckResult("problem", detail, "set VLLM_CACHE_ROOT to a folder that takes files and locks, and keep it")
    held = {path.name: locks.is_held(folder / f"lock-{path.stem}") for path in folder.glob("first-call-*.json")}
    unreadable = [name for name, is_held in held.items() if is_held is None]
    if unreadable:
        detail = (
            f"not_marked: the locks of {', '.join(unreadable)} in {folder} cannot be read, so a start with the same "
        )
        return CheckResult(
            "warning", f"{detail}build and card leaves kernels out", "if that start has ended, remove both"
        )
    aborted = [name for name, is_held in held.items() if is_held is False]
    if aborted:
        detail = f"{ABORTED}: {', '.join(aborted)} in {folder}: a start with the same build and card leaves kernels out"
        return CheckResult("warning", detail, REMEDIES[ABORTED])
    return CheckResult("ok", f"{folder} takes files and locks, and holds no note of a start that a kernel has ended")


def check_switches(environment: Environment) -> CheckResult:
    """Check vLLM's variables: AITER and its MLA are on, batch invariance is off, and MLA is not disabled."""
    try:
        is_on = {
            name: _is_on(name, environment[name]) if name in environment else SWITCHES[name][1] for name in SWITCHES
        }
    except ValueError as error:
        return CheckResult("problem", f"vLLM does not start: {error}", "set 0 or 1")
    wrong_switches = [name for name, (required, _) in SWITCHES.items() if is_on[name] != required]
    if not wrong_switches:
        return CheckResult(
            "ok",
            ", ".join(f"{name}={environment[name]}" if name in environment else f"{name} unset" for name in SWITCHES),
        )
    code = "mla_disabled" if vllm_options.NO_MLA in wrong_switches else "aiter_off"
    needed = ", ".join(
        f"{name}={int(SWITCHES[name][0])} (it is {environment.get(name, 'unset')})" for name in wrong_switches
    )
    detail = f"{code}: vLLM takes another attention, so no layer engages without {needed}"
    # Without ROCm vLLM does not read AITER's switches.
    is_problem = rocm_version() is not None or any(not SWITCHES[name][0] for name in wrong_switches)
    return CheckResult("problem" if is_problem else "warning", detail, REMEDIES[code])


def _is_on(name: str, value: str) -> bool:
    """Return whether vLLM reads the value of a switch as on. AITER's switches are words, others are numbers.

    Raises:
        ValueError: vLLM cannot read the value.
    """
    if name.startswith(vllm_options.USE_AITER):
        return value.lower() in ("1", "true")
    try:
        return bool(int(value))
    except ValueError:
        raise ValueError(f"{name}={value}: a number expected") from None


CHECKS = (
    check_switches, check_torch, check_rocm, check_gpu, check_triton, check_hip_python, check_vllm, check_plugin,
    check_surface, check_patches, check_aiter, check_code_objects, check_verified, check_atom, check_cache_root,
)  # fmt: skip
"""All checks, in the order in which they run. Users forget the variables of ``check_switches`` most often."""


# -- facts about this machine


def installed_device() -> Any:
    """Return torch's ``Device``, or None if torch cannot be imported."""
    try:
        from vllm_aiter_mla.kernels import device
    except Exception:
        return None
    return device.card()


def rocm_version() -> str | None:
    """Return the ROCm release that torch was built for, or else the installed one, or None."""
    if (device := installed_device()) is not None and device.rocm:
        return str(device.rocm)
    return ROCM_VERSION.read_text().strip() if ROCM_VERSION.is_file() else None


def gpu_arch() -> str | None:
    """Return the architecture of the current device, or else of the first card in AMD's driver: gfx942, sm90, ..."""
    if (device := installed_device()) is not None and device.is_there():
        return str(device.arch)
    for node in sorted(KFD_NODES.glob("*/properties")):
        for line in node.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and int(value):
                # 90402 is gfx942: decimal pairs are major, minor and stepping. The name has them in hexadecimal.
                return f"gfx{int(value) // 10000}{int(value) // 100 % 100:x}{int(value) % 100:x}"
    return None


def vllm_version() -> str | None:
    """Return vLLM's version, from its metadata if possible. Return None if vLLM is not installed."""
    try:
        if importlib.util.find_spec("vllm") is None:
            return None
    except (ImportError, ValueError):
        return None
    return files.stamp("check").vllm or release.vllm_version()


def _package_name(point: importlib.metadata.EntryPoint) -> str:
    return point.value.partition(":")[0].partition(".")[0]
