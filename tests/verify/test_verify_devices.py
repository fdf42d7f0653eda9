"""The vendors' runtimes: one clear sentence where there is no device."""

import os
import subprocess
import sys
from enum import IntEnum
from types import SimpleNamespace

import pytest

from vllm_aiter_mla.verify import devices
from vllm_aiter_mla.verify.devices import DeviceError


class Code(IntEnum):
    """hip-python's error codes, as ``hipError_t`` has them."""

    hipSuccess = 0  # noqa: N815
    hipErrorInvalidValue = 1  # noqa: N815
    hipErrorNoDevice = 100  # noqa: N815


@pytest.fixture
def hip(monkeypatch):
    """Puts a module like hip-python's, with one MI300X, in its place; the arguments replace some of its calls."""

    def install(**calls):
        usual = {
            "hipGetDeviceCount": lambda: (Code.hipSuccess, 1),
            "hipRuntimeGetVersion": lambda: (Code.hipSuccess, 70_051_831),
            "hipDriverGetVersion": lambda: (Code.hipSuccess, 70_051_831),
        }
        monkeypatch.setitem(sys.modules, "hip", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "hip.hip", SimpleNamespace(**(usual | calls)))

    return install


def test_no_device_is_one_sentence_with_the_name_of_the_error(hip):
    hip(hipGetDeviceCount=lambda: (Code.hipErrorNoDevice, 0))
    with pytest.raises(DeviceError, match=r"^hipGetDeviceCount says hipErrorNoDevice$"):
        devices.hip_dot(1)


def test_no_library_is_one_sentence(hip):
    def missing():
        raise RuntimeError("failed to dlopen 'b'libamdhip64.so'': cannot open shared object file\nmore\nlines")

    hip(hipGetDeviceCount=missing)
    with pytest.raises(DeviceError) as caught:
        devices.hip_dot(1)
    assert "libamdhip64" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_call_that_the_library_lacks_is_one_sentence(hip):
    hip()
    with pytest.raises(DeviceError, match="cannot call hipGraphDebugDotPrint"):
        devices.hip_dot(1)


def test_hip_python_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hip", None)
    monkeypatch.setitem(sys.modules, "hip.hip", None)
    with pytest.raises(DeviceError, match=r"'\.\[rocm\]'"):
        devices.hip_versions()


def test_versions_are_those_of_rocm(hip):
    hip()
    assert devices.hip_versions() == {"hip runtime": "7.0.51831", "hip driver": "7.0.51831"}


def test_the_plain_dump_is_asked_for_with_flags_0(dump, hip):
    """A verbose one is printed into a buffer of 500 bytes by ROCm's older runtimes, whatever a kernel's name."""
    asked = []

    def print_dot(graph, path, flags):
        asked.append((graph, flags))
        with open(path, "w") as file:
            file.write(dump("hip_plain"))
        return (Code.hipSuccess,)

    hip(hipGraphDebugDotPrint=print_dot)
    assert "fuse_qk_rope" in devices.hip_dot(0x1234)
    assert asked == [(0x1234, 0)]


def test_two_loaded_runtimes_are_refused_before_a_graph_crosses_over(tmp_path):
    line = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format("/a/libamdhip64.so.7") * 2)
    devices.check_one_runtime(maps)
    maps.write_text(line.format("/a/libamdhip64.so.7") + line.format("/b/libamdhip64.so"))
    with pytest.raises(DeviceError, match="two HIP runtimes"):
        devices.check_one_runtime(maps)


def test_the_real_hip_python_says_one_sentence_here():
    """With hip-python installed and no AMD GPU; set HIP_PYTHON to an interpreter that has it, or install it here."""
    python = os.environ.get("HIP_PYTHON", sys.executable)
    code = (
        "import sys\n"
        "try:\n    from hip import hip\nexcept ImportError:\n    sys.exit(77)\n"
        "import importlib.util, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "spec = importlib.util.spec_from_file_location('devices', sys.argv[1])\n"
        "devices = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(devices)\n"
        "try:\n    print('devices:', devices.hip_call('hipGetDeviceCount')[0])\n"
        "except devices.DeviceError as error:\n    print('DeviceError:', error)\n"
    )
    done = subprocess.run([python, "-c", code, devices.__file__], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("hip-python is not installed; HIP_PYTHON names no interpreter that has it")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("DeviceError: hip", "devices: "))
    assert len(done.stdout.strip().splitlines()) == 1
