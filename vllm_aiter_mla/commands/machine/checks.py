# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine, the packages on it, and vLLM's variables; each is named like its function."""

import importlib.metadata
import importlib.util
import mmap
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vllm_aiter_mla import files, packages
from vllm_aiter_mla.admission import REMEDIES
from vllm_aiter_mla.commands.cards import ARCHITECTURES, sold_as
from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.kernels.aiter import op
from vllm_aiter_mla.settings import NAMESPACE
from vllm_aiter_mla.status.line import not_measured_note
from vllm_aiter_mla.verify import hip_python as bindings

Status = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True)
class Check:
    """What one check found."""

    # "warning": it works, but look at it. "problem": the fast path will not engage, or not work.
    status: Status
    detail: str  # the finding, with the figures
    remedy: str = ""  # what to do; empty if there is nothing to do
    name: str = ""  # of the check; filled in by ``run_checks``


Env = Mapping[str, str]
"""Environment variables."""
CheckFunction = Callable[[Env], Check]

OLDEST_ROCM = 7
# Paths that a test replaces.
ROCM_VERSION = Path("/opt/rocm/.info/version")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
CONDITIONS = f"the fast path needs ROCm {OLDEST_ROCM} or newer and a card of {' or '.join(ARCHITECTURES)}"
SEE_GPU = "see the line `gpu`"
SEE_VLLM = "see the line `vllm`"
NO_VLLM = Check("unknown", "vLLM is not installed", SEE_VLLM)
VERIFIED = Path(__file__).with_name("verified.json")  # evidence by release line of each package
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"
SWITCHES = {
    offline.USE_AITER: (True, False),
    offline.USE_AITER_MLA: (True, True),
    offline.BATCH_INVARIANT: (False, False),
    offline.NO_MLA: (False, False),
}
"""vLLM's switches: as the fast path needs them, and their default in every release of the window (vllm/envs.py)."""


def torch(env: Env) -> Check:
    """Check that torch is there, and what it was built for."""
    try:
        module = import_module("torch")
    except Exception as error:
        return Check("problem", f"not importable: {error}", "install the ROCm build of torch; vLLM needs it too")
    built_for = card().built_for
    if built_for.startswith("ROCm"):
        return Check("ok", f"{module.__version__} for {built_for}")
    kind = f"for {built_for}" if built_for else "a CPU build"
    if gpu_arch() is not None:
        detail = f"{module.__version__}, {kind}: the fast path needs ROCm"
        return Check("problem", detail, "use the ROCm build of torch")
    return Check("warning", f"{module.__version__}, {kind}: the plan and tests run, nothing else", SEE_GPU)


def rocm(env: Env) -> Check:
    """Check the ROCm release: the one torch was built for, else the installed one."""
    version = rocm_version()
    if version is None:
        return Check("unknown", "no ROCm is visible here", SEE_GPU)
    if int(version.partition(".")[0]) >= OLDEST_ROCM:
        return Check("ok", version)
    return Check("problem", f"{version}: AITER's bf16 arithmetic is wrong before 7", "use ROCm 7 or newer")


def gpu(env: Env) -> Check:
    """Check the card's architecture."""
    arch = gpu_arch()
    if arch is None:
        return Check("unknown", f"no GPU is visible here (platform): {CONDITIONS}", REMEDIES["platform"])
    if arch in ARCHITECTURES:
        return Check("ok", f"{arch} ({sold_as(arch)}){not_measured_note(arch)}")
    if arch.startswith("gfx"):
        return Check("problem", f"{arch} (platform): {CONDITIONS}", REMEDIES["platform"])
    return Check("problem", f"{arch} (platform): not an AMD card, and {CONDITIONS}", REMEDIES["platform"])


def triton(env: Env) -> Check:
    """Check for Triton, whose kernel is the only one of ours that ``kernel=auto`` runs over an fp8 KV cache."""
    try:
        return Check("ok", f"triton {import_module('triton').__version__}")
    except Exception as error:
        if packages.missing_package(error) == "triton":
            problem, remedy = "not installed", "install the Triton that belongs to your torch"
        else:
            problem, remedy = f"cannot be imported: {error}", "reinstall the Triton that belongs to your torch"
    return Check("warning", f"{problem}: kernel=triton is not available, so none of ours for an fp8 KV cache", remedy)


def hip_python(env: Env) -> Check:
    """Check that hip-python, which only the step ``kernels`` needs, can be used and is made for this ROCm."""
    module_or_problem, version, rocm = bindings.find(), bindings.version(), rocm_version()
    if module_or_problem == bindings.ABSENT and rocm is None:
        return Check("ok", "not installed, and not needed without ROCm")
    if isinstance(module_or_problem, str):
        return Check("warning", f"{module_or_problem}: the step kernels checks less", bindings.install(rocm))
    if rocm is not None and version is not None and rocm.partition(".")[0] != bindings.made_for():
        detail = f"hip-python {version} is made for ROCm {bindings.made_for()}, and this is ROCm {rocm}"
        return Check("warning", detail, bindings.install(rocm))
    return Check("ok", f"hip-python {version or 'without metadata'}")


def vllm(env: Env) -> Check:
    """Check vLLM's version against the window, without importing vLLM."""
    version = vllm_version()
    window = "{}.{} <= vLLM < {}.{}".format(*release.WINDOW[0], *release.WINDOW[1])
    if version is None:
        return Check("problem", "vLLM is not installed", f"install vLLM for ROCm, {window}")
    if release.in_window(version):
        return Check("ok", f"{version}, inside {window}")
    return Check("problem", f"{version} is outside {window}: the plugin stays off", REMEDIES["vllm_version"])


def plugin(env: Env) -> Check:
    """Check that vLLM finds this plugin, and that ``VLLM_PLUGINS``, an allow-list, names it if it is set."""
    points = importlib.metadata.entry_points(group=GENERAL)
    ours = {point.value for point in points if point.name == NAMESPACE}
    others = {point.name for point in points if point.name != NAMESPACE and _package(point) != "vllm"}
    also = f"; other plugins: {', '.join(sorted(others))}" if others else ""
    if not ours:
        return Check("problem", f"no entry point {NAMESPACE} in {GENERAL}{also}", "in a checkout: pip install .")
    if len(ours) > 1:
        return Check("warning", f"{NAMESPACE} is registered more than once", "remove all but one installation")
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and NAMESPACE not in offline.plugins(allowed):
        remedy = f"add {NAMESPACE} to VLLM_PLUGINS, names separated by commas without blanks, or unset it"
        return Check("problem", f"VLLM_PLUGINS={allowed!r} leaves {NAMESPACE} out: the flag will be unknown", remedy)
    return Check("ok", f"entry point {NAMESPACE} = {ours.pop()}{also}")


def surface(env: Env) -> Check:
    """Check that vLLM has the hooks that the plugin needs, and MLA ops with the arguments that the passes know."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla.compat.layer import missing_names

    lacking = (*release.missing_capabilities(), *missing_names())
    differing = (*release.op_differences(fused=False), *release.op_differences(fused=True))
    if lacking or differing:
        problem = "; ".join([*(f"this vLLM lacks {name}" for name in lacking), *differing])
        return Check("problem", f"{problem}: the plugin stays off", REMEDIES["capability" if lacking else "op_schema"])
    return Check("ok", "vLLM has every hook that the plugin needs, and the MLA ops that it knows")


def patches(env: Env) -> Check:
    """Apply the plugin's patches and define its ops, as a server would."""
    if vllm_version() is None:
        return NO_VLLM
    from vllm_aiter_mla import plugin as ours
    from vllm_aiter_mla.compat import patches
    from vllm_aiter_mla.gate import define_ops

    ours.register()
    define_ops()
    patches.look_at_hash()
    failures = patches.failures()
    if not failures:
        return Check("ok", ", ".join(patches.PATCHES))
    shown = "; ".join(f"{name}: {error}" for name, error in failures.items())
    if patches.failures(needed=True):
        return Check("problem", f"{shown}: vLLM runs unmodified", f"{SEE_VLLM}; report it with this line")
    return Check("warning", shown, "use additional_config.aiter_mla instead of the flag")


def aiter(env: Env) -> Check:
    """Check AITER from its files, without importing it."""
    located = op.locate_aiter()
    if located.reason is not None:
        if located.package is None and located.distribution is None and rocm_version() is None:
            return Check("unknown", f"{located.reason}; no ROCm is here either", SEE_GPU)
        return Check("problem", f"kernel_unavailable: {located.reason}", REMEDIES["kernel_unavailable"])
    detail = f"{located.distribution or 'without metadata'}, {len(located.signature)} arguments"
    if located.prebuilt:
        return Check("ok", f"{detail}, built")
    detail += "; module_cache is not built: the first start compiles it, which takes minutes"
    return Check("warning", detail, "nothing; expect a slow first start")


def code_objects(env: Env) -> Check:
    """Check that the compiled modules of vLLM and AITER that hold AMD code hold code for this card."""
    arch = gpu_arch()
    if arch is None or not arch.startswith("gfx"):
        return Check("unknown", "no AMD card is visible here", SEE_GPU)
    by_module = {path: architectures_of(path) for path in compiled_modules()}
    with_code = {path: architectures for path, architectures in by_module.items() if architectures}
    if not with_code:  # of a CPU, or in a bundle that is compressed
        return Check("unknown", f"no AMD code can be seen in {len(by_module)} modules of vLLM and AITER", SEE_VLLM)
    missing = [path.name for path, architectures in with_code.items() if arch not in architectures]
    if missing:
        return Check("problem", f"no code for {arch} in {', '.join(missing)}", "install builds for this card")
    return Check("ok", f"{len(with_code)} modules hold code for {arch}")


def compiled_modules() -> list[Path]:
    """Return the shared objects of vLLM and of AITER's built modules."""
    modules: list[Path] = []
    for package, pattern in (("vllm", "*.so"), ("aiter", "jit/*.so")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            modules += sorted(Path(spec.origin).parent.glob(pattern))
    return modules


def architectures_of(path: Path) -> set[str]:
    """Return the AMD architectures whose code a shared object holds, by the names of its bundle; none without any."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name.decode() for name in re.findall(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)", content)}


def verified(env: Env) -> Check:
    """Compare the releases here with those that this project has run; no card was at hand for ROCm and AITER."""
    here = {
        "vLLM": vllm_version(),
        "torch": packages.installed_distribution("torch"),
        "Python": platform.python_version(),
        "ROCm": rocm_version(),
        "AITER": packages.installed_distribution(*packages.AITER),
    }
    lines = {name: ".".join(text.split()[-1].split(".")[:2]) for name, text in here.items() if text is not None}
    known = files.load(VERIFIED)
    never = ", ".join(f"{name} {line}" for name, line in lines.items() if line not in known[name])
    if never:
        return Check("warning", f"never run by this project: {never}", "run `vllm-aiter-mla check` where you serve")
    return Check("ok", "; ".join(f"{name} {line}: {known[name][line]}" for name, line in lines.items()))


def atom(env: Env) -> Check:
    """Check that ATOM's platform plugin, which replaces the models, is absent or off."""
    if not any(_package(point) == "atom" for point in importlib.metadata.entry_points(group=PLATFORM)):
        return Check("ok", "ATOM's vLLM plugin is not installed")
    if env.get("ATOM_DISABLE_VLLM_PLUGIN") == "1":
        return Check("ok", "installed and switched off by ATOM_DISABLE_VLLM_PLUGIN=1")
    return Check("problem", "ATOM's plugin owns the model: this plugin stays off", REMEDIES["atom"])


def switches(env: Env) -> Check:
    """Check vLLM's variables: AITER and its MLA on, batch invariance off, MLA not disabled."""
    try:
        is_on = {name: _is_on(name, env[name]) if name in env else SWITCHES[name][1] for name in SWITCHES}
    except ValueError as error:
        return Check("problem", f"vLLM does not start: {error}", "set 0 or 1")
    wrong = [name for name, (wanted, _) in SWITCHES.items() if is_on[name] != wanted]
    if not wrong:
        return Check("ok", ", ".join(f"{name}={env[name]}" if name in env else f"{name} unset" for name in SWITCHES))
    code = "mla_disabled" if offline.NO_MLA in wrong else "aiter_off"
    needed = ", ".join(f"{name}={int(SWITCHES[name][0])} (it is {env.get(name, 'unset')})" for name in wrong)
    detail = f"{code}: vLLM takes another attention, so no layer engages without {needed}"
    # Without ROCm vLLM reads none of AITER's.
    matters = rocm_version() is not None or any(not SWITCHES[name][0] for name in wrong)
    return Check("problem" if matters else "warning", detail, REMEDIES[code])


def _is_on(name: str, value: str) -> bool:
    """Return whether vLLM reads a value of a switch as on: AITER's as a word, others as a number.

    Raises:
        ValueError: vLLM cannot read it.
    """
    if name.startswith(offline.USE_AITER):
        return value.lower() in ("1", "true")
    try:
        return bool(int(value))
    except ValueError:
        raise ValueError(f"{name}={value}: a number expected") from None


CHECKS = (
    switches, torch, rocm, gpu, triton, hip_python, vllm, plugin, surface, patches, aiter, code_objects,
    verified, atom,
)  # fmt: skip
"""In the order in which they run. ``switches`` comes first: its variables are forgotten most often."""


# -- what the checks look at


def card() -> Any:
    """Return the installed ``Device``; None if torch cannot be imported."""
    try:
        from vllm_aiter_mla.kernels import device
    except Exception:
        return None
    return device.card()


def rocm_version() -> str | None:
    """Return the ROCm release that torch was built for, else the installed one, else None."""
    if (here := card()) is not None and here.rocm:
        return str(here.rocm)
    return ROCM_VERSION.read_text().strip() if ROCM_VERSION.is_file() else None


def gpu_arch() -> str | None:
    """Return gfx942, sm90, ...: of the current device, else of the first card that the AMD driver lists."""
    if (here := card()) is not None and here.is_there():
        return str(here.arch)
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
    return files.stamp("check").vllm or release.vllm_version()


def _package(point: importlib.metadata.EntryPoint) -> str:
    return point.value.partition(":")[0].partition(".")[0]
