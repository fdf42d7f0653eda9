# SPDX-License-Identifier: Apache-2.0
"""The checks: the machine from its card to the packages on it, what the plugin calls in vLLM, vLLM's variables."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import mmap
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from vllm_aiter_mla import files, status
from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.compat import config
from vllm_aiter_mla.kernels.aiter import op
from vllm_aiter_mla.settings import NAMESPACE

Status = Literal["ok", "warning", "problem", "unknown"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem", "unknown")


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        status: "ok"; "warning", it works but look at it; "problem", the fast path will not engage or not work;
            "unknown", it cannot be told from here.
        detail: the finding, with the figures.
        remedy: what to do; empty if there is nothing to do.
        name: of the check; filled in by ``run``.
    """

    status: Status
    detail: str
    remedy: str = ""
    name: str = ""


Env = Mapping[str, str]
"""Environment variables."""
CheckFunction = Callable[[Env], Check]

ARCHITECTURES = {"gfx942": "MI300X, MI325X", "gfx950": "MI350X, MI355X"}
OLDEST_ROCM = 7
# Paths that a test replaces.
ROCM_VERSION = Path("/opt/rocm/.info/version")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
AMD_MODULE = Path("/sys/module/amdgpu")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SEE_TORCH = "see the line `torch` above"
ELSEWHERE = "run doctor on the machine that serves"
SEE_VLLM = "see the line `vllm` above"
NO_VLLM = Check("unknown", "vLLM is not installed", SEE_VLLM)
VERIFIED = Path(__file__).parent / "verified.json"
"""Evidence by release line of each package."""
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"


def python(env: Env) -> Check:
    """Say the interpreter's version; one that is too old cannot import this module."""
    return Check("ok", platform.python_version())


def torch(env: Env) -> Check:
    """Check that torch is there, and what it was built for."""
    found = module("torch")
    if isinstance(found, Exception):
        return Check("problem", f"not importable: {found}", "install the ROCm build of torch; vLLM needs it too")
    if found.version.hip:
        return Check("ok", f"{found.__version__} for ROCm {found.version.hip}")
    kind = f"for CUDA {found.version.cuda}" if found.version.cuda else "a CPU build"
    if gpu_arch() is not None:
        return Check("problem", f"{found.__version__}, {kind}: the fast path needs ROCm", "use the ROCm build of torch")
    return Check("warning", f"{found.__version__}, {kind}: for plan and tests", ELSEWHERE)


def rocm(env: Env) -> Check:
    """Check the ROCm release: the one torch was built for, else the installed one."""
    version = rocm_version()
    if version is None:
        return Check("unknown", "no ROCm is visible from here", ELSEWHERE)
    if int(version.partition(".")[0]) >= OLDEST_ROCM:
        return Check("ok", version)
    return Check("problem", f"{version}: AITER's bf16 arithmetic is wrong before 7", "use ROCm 7 or newer")


def driver(env: Env) -> Check:
    """Check the kernel driver, from its own files."""
    if AMD_MODULE.is_dir():
        version = AMD_MODULE / "version"
        return Check("ok", f"amdgpu {version.read_text().strip() if version.is_file() else 'of the kernel'}")
    if NVIDIA_DRIVER.is_file():
        return Check("problem", f"NVIDIA: {NVIDIA_DRIVER.read_text().splitlines()[0]}", SEE_TORCH)
    return Check("unknown", "no GPU driver is visible from here", ELSEWHERE)


def gpu(env: Env) -> Check:
    """Check the card's architecture."""
    arch = gpu_arch()
    if arch is None:
        return Check("unknown", "no GPU is visible from here", ELSEWHERE)
    if arch in ARCHITECTURES:
        return Check("ok", f"{arch} ({ARCHITECTURES[arch]}){status.unmeasured(arch)}")
    if arch.startswith("gfx"):
        return Check("problem", f"{arch}: AITER's op is for {', '.join(ARCHITECTURES)}", "serve on another card")
    return Check("problem", f"{arch}: not an AMD card; no MLA implementation there is admitted", SEE_TORCH)


def triton(env: Env) -> Check:
    """Check for Triton, which only ``kernel=triton`` needs."""
    version = distribution("triton", "pytorch-triton-rocm", "triton-rocm")
    if version is None:
        return Check("warning", "not installed: kernel=triton is not available", "only if you want that kernel")
    return Check("ok", version)


def hip_python(env: Env) -> Check:
    """Check for hip-python, which only ``verify`` needs."""
    version = distribution("hip-python")
    if version is None and rocm_version() is not None:
        return Check("warning", "not installed: `verify` checks less", "in a checkout: pip install '.[rocm]'")
    return Check("ok", version or "not installed, and not needed without ROCm")


def vllm(env: Env) -> Check:
    """Check vLLM's version against the window, without importing vLLM."""
    version = vllm_version()
    window = "{}.{} <= vLLM < {}.{}".format(*config.WINDOW[0], *config.WINDOW[1])
    if version is None:
        return Check("problem", "vLLM is not installed", f"install vLLM for ROCm, {window}")
    if config.in_window(version):
        return Check("ok", f"{version}, inside {window}")
    remedy = "use a release inside, or try additional_config.aiter_mla.debug.untested_vllm=true"
    return Check("problem", f"{version} is outside {window}: the plugin stays off", remedy)


def plugin(env: Env) -> Check:
    """Check that vLLM finds this plugin, and name the other plugins."""
    points = importlib.metadata.entry_points(group=GENERAL)
    ours = {point.value for point in points if point.name == NAMESPACE}
    others = {point.name for point in points if point.name != NAMESPACE and _package(point) != "vllm"}
    also = f"; other plugins: {', '.join(sorted(others))}" if others else ""
    if not ours:
        return Check("problem", f"no entry point {NAMESPACE} in {GENERAL}{also}", "in a checkout: pip install .")
    if len(ours) > 1:
        return Check("warning", f"{NAMESPACE} is registered more than once", "remove all but one installation")
    return Check("ok", f"entry point {NAMESPACE} = {ours.pop()}{also}")


def vllm_plugins(env: Env) -> Check:
    """Check that ``VLLM_PLUGINS``, an allow-list, names this plugin if it is set."""
    allowed = env.get("VLLM_PLUGINS")
    if allowed is None:
        return Check("ok", "VLLM_PLUGINS is unset: every plugin is loaded")
    if NAMESPACE in [name.strip() for name in allowed.split(",")]:
        return Check("ok", f"VLLM_PLUGINS={allowed}")
    remedy = f"add {NAMESPACE} to VLLM_PLUGINS, or unset it"
    return Check("problem", f"VLLM_PLUGINS={allowed!r} leaves {NAMESPACE} out: the flag will be unknown", remedy)


def surface(env: Env) -> Check:
    """Check that vLLM has the hooks that the plugin needs."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla.compat.layer import missing_names

    missing = (*config.missing_capabilities(), *missing_names())
    if missing:
        return Check("problem", f"this vLLM lacks {', '.join(missing)}: the plugin stays off", SEE_VLLM)
    return Check("ok", "vLLM has every hook that the plugin needs")


def mla_ops(env: Env) -> Check:
    """Check that vLLM's MLA ops have the arguments that the passes know."""
    if vllm_version() is None:
        return NO_VLLM
    importlib.import_module(config.ATTENTION_MODULE)
    found = config.op_differences()
    if found:
        return Check("problem", f"{'; '.join(found)}: the plugin stays off", SEE_VLLM)
    return Check("ok", ", ".join(config.OP_ARGUMENTS))


def patches(env: Env) -> Check:
    """Apply the plugin's patches as vLLM would have them applied."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla import plugin as ours
    from vllm_aiter_mla.compat import patches

    ours.register()
    failures = patches.failures()
    if not failures:
        return Check("ok", ", ".join(patches.PATCHES))
    shown = "; ".join(f"{name}: {error}" for name, error in failures.items())
    if patches.failed_requirements():
        return Check("problem", f"{shown}: vLLM runs unmodified", f"{SEE_VLLM}; report it with this line")
    return Check("warning", shown, "use additional_config.aiter_mla instead of the flag")


def aiter(env: Env) -> Check:
    """Check AITER from its files, without importing it."""
    found = op.locate_aiter()
    if found.reason is not None:
        if found.package is None and found.distribution is None and rocm_version() is None:
            return Check("unknown", "not installed here, and no ROCm either", ELSEWHERE)
        return Check("problem", found.reason, "see docs/kernels.md")
    detail = f"{found.distribution or 'without metadata'}, {len(found.signature)} arguments"
    if found.prebuilt:
        return Check("ok", f"{detail}, built")
    detail += "; module_cache is not built: the first start compiles it, which takes minutes"
    return Check("warning", detail, "nothing; expect a slow first start")


def code_objects(env: Env) -> Check:
    """Check that the compiled modules of vLLM and AITER that hold AMD code hold code for this card."""
    arch = gpu_arch()
    if arch is None or not arch.startswith("gfx"):
        return Check("unknown", "no AMD card is visible from here", ELSEWHERE)
    held = {path: architectures_of(path) for path in compiled_modules()}
    missing = [path.name for path, found in held.items() if found and arch not in found]
    if missing:
        return Check("problem", f"no code for {arch} in {', '.join(missing)}", "install builds for this card")
    return Check("ok", f"{sum(bool(found) for found in held.values())} modules hold code for {arch}")


def compiled_modules() -> list[Path]:
    """Return the shared objects of vLLM and of AITER's built modules."""
    found: list[Path] = []
    for package, pattern in (("vllm", "*.so"), ("aiter", "jit/*.so")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += sorted(Path(spec.origin).parent.glob(pattern))
    return found


def architectures_of(path: Path) -> set[str]:
    """Return the AMD architectures whose code a shared object holds, by the names of its bundle; none without any."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name.decode() for name in re.findall(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)", content)}


def verified(env: Env) -> Check:
    """Compare the releases here with those that this project has run; no card was at hand for ROCm and AITER."""
    here = {
        "vLLM": vllm_version(),
        "torch": distribution("torch"),
        "Python": platform.python_version(),
        "ROCm": rocm_version(),
        "AITER": distribution("amd-aiter", "aiter"),
    }
    lines = {name: ".".join(one.split()[-1].split(".")[:2]) for name, one in here.items() if one is not None}
    known = json.loads(VERIFIED.read_text(encoding="utf-8"))
    never = [f"{name} {line}" for name, line in lines.items() if line not in known[name]]
    if never:
        return Check(
            "warning", f"never run by this project: {', '.join(never)}", "run `vllm-aiter-mla check` where you serve"
        )
    return Check("ok", "; ".join(f"{name} {line}: {known[name][line]}" for name, line in lines.items()))


def atom(env: Env) -> Check:
    """Check that ATOM's platform plugin, which replaces the models, is absent or off."""
    if not any(_package(point) == "atom" for point in importlib.metadata.entry_points(group=PLATFORM)):
        return Check("ok", "ATOM's vLLM plugin is not installed")
    if env.get("ATOM_DISABLE_VLLM_PLUGIN") == "1":
        return Check("ok", "installed and switched off by ATOM_DISABLE_VLLM_PLUGIN=1")
    return Check("problem", "ATOM's plugin owns the model: this plugin stays off", "set ATOM_DISABLE_VLLM_PLUGIN=1")


def use_aiter(env: Env) -> Check:
    """Check that vLLM's attention is AITER's."""
    if rocm_version() is None:
        return Check("ok", f"{offline.USE_AITER} has no effect without ROCm; with ROCm set it to 1")
    for name, default in ((offline.USE_AITER, False), (offline.USE_AITER_MLA, True)):
        if not _on(env, name, default):
            origin = f"={env[name]}" if name in env else " is unset, which means off"
            return Check("problem", f"{name}{origin}: vLLM takes another MLA backend", f"set {name}=1")
    return Check("ok", f"{offline.USE_AITER}=1")


def batch_invariant(env: Env) -> Check:
    """Check that vLLM need not be batch-invariant: AITER's attention is not."""
    if not _on(env, offline.BATCH_INVARIANT):
        return Check("ok", f"{offline.BATCH_INVARIANT} is off")
    detail = f"{offline.BATCH_INVARIANT} is on: vLLM takes Triton's MLA attention, no layer engages"
    return Check("problem", detail, "unset it")


def mla(env: Env) -> Check:
    """Check that layers may use MLA."""
    if not _on(env, offline.NO_MLA):
        return Check("ok", f"{offline.NO_MLA} is off")
    return Check("problem", f"{offline.NO_MLA} is on: no layer uses MLA", f"unset {offline.NO_MLA}")


def module(name: str) -> ModuleType | Exception:
    """Return the imported module, or the exception of the attempt."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def distribution(*names: str) -> str | None:
    """Return name and version of the first of ``names`` that is installed."""
    found = (one for name in names for one in importlib.metadata.distributions(name=name))
    return next((f"{one.name} {one.version}" for one in found), None)


def rocm_version() -> str | None:
    """Return the ROCm release that torch was built for, else the installed one, else None."""
    found = module("torch")
    if not isinstance(found, Exception) and found.version.hip:
        return str(found.version.hip)
    return ROCM_VERSION.read_text().strip() if ROCM_VERSION.is_file() else None


def gpu_arch() -> str | None:
    """Return gfx942, sm90, ...: of the current device, else of the first card that the AMD driver lists."""
    found = module("torch")
    if not isinstance(found, Exception) and found.cuda.is_available():
        from vllm_aiter_mla.kernels.platform import detect_platform

        return detect_platform().arch
    for node in sorted(KFD_NODES.glob("*/properties")):
        for line in node.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and int(value):
                # 90402 is gfx942: decimal pairs are major, minor and stepping; the name has them in hexadecimal.
                return f"gfx{int(value) // 10000}{int(value) // 100 % 100:x}{int(value) % 100:x}"
    return None


def vllm_version() -> str | None:
    """Return vLLM's version, from metadata if there are any; None if it is not installed."""
    try:
        if importlib.util.find_spec("vllm") is None:
            return None
    except (ImportError, ValueError):
        return None
    return files.stamp("doctor")[files.KEY]["vllm"] or config.vllm_version()


def _on(env: Env, name: str, default: bool = False) -> bool:
    """Read a variable as vLLM does; its default is the same in every release of the window (vllm/envs.py)."""
    return env[name].lower() in ("1", "true") if name in env else default


def _package(point: importlib.metadata.EntryPoint) -> str:
    return point.value.partition(":")[0].partition(".")[0]


CHECKS = (
    python, torch, rocm, driver, gpu, triton, hip_python,
    vllm, plugin, vllm_plugins, surface, mla_ops, patches, aiter, code_objects, verified, atom,
    use_aiter, batch_invariant, mla,
)  # fmt: skip
