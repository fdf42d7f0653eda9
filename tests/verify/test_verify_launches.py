"""Launches of captured graphs: HIP's and torch's dumps, and the parser on dumps of both (data/README.md)."""

import sys
from enum import IntEnum
from types import SimpleNamespace

import pytest

from tests.support.planted import raising
from vllm_aiter_mla.verify import hip_python, launches
from vllm_aiter_mla.verify.launches import DumpError, of_dot, violation

BMM = "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64"
FUSED = "_ZN5aiter44fuse_qk_rope_concat_and_cache_mla_opt_kernelIDF16bhLb0EEEvPKT_S3_PT0_iii"
VLLM_OWN = (BMM, "rotary_embedding_kernel", "concat_and_cache_mla_kernel", "static_scaled_fp8_quant_kernel")


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [("cuda_verbose", "_ZN2at6native29vectorized_elementwise_kernel", ("decode_prep_kernel", "MEMCPY", "MEMSET")),
     ("hip_plain", BMM[:20], (FUSED, "MEMCPY"))],
)  # fmt: skip
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_dump_names_kernels_and_other_work_and_leaves_out_barriers(dump, name, first, others, newline):
    found = of_dot(dump(name).replace("\n", newline))
    assert found[0].startswith(first)
    assert found[1:] == others


def test_a_node_of_an_unknown_kind_is_counted_not_dropped():
    text = 'digraph dot {\n"graph_0_node_0"[style="solid" shape="record" label="{brand new | 1}"];\n}\n'
    assert of_dot(text) == ("UNKNOWN",)


@pytest.mark.parametrize("text", ["", "not a graph", "digraph dot {\n}\n"])
def test_a_dump_without_nodes_is_an_error_and_no_empty_list(text):
    with pytest.raises(DumpError):
        of_dot(text)


@pytest.mark.parametrize(
    ("backend", "names", "layers", "budget"),
    [("triton", ("decode_prep_kernel",) * 2, 2, None), ("aiter", (BMM, FUSED), 1, None),
     ("aiter", (BMM, "splitk_reduce", FUSED), 1, None), ("reference", ("a", "b"), 1, 2), ("mine", ("a", "b"), 1, None)],
)  # fmt: skip
def test_launches_that_a_back_end_may_make(backend, names, layers, budget):
    assert violation(backend, names, layers, budget) is None


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("backend", "names", "layers", "budget"),
    [("triton", ("decode_prep_kernel",) * 2, 1, None), ("triton", VLLM_OWN, 1, None), ("aiter", VLLM_OWN, 1, None),
     ("aiter", (BMM,), 1, None), ("aiter", (BMM, FUSED, "MEMCPY"), 1, None), ("reference", ("a", "b"), 1, 1)],
)  # fmt: skip
def test_mutation_launches_that_a_back_end_may_not_make(backend, names, layers, budget):
    assert f"{len(names)} launch" in violation(backend, names, layers, budget)


class Code(IntEnum):
    hipSuccess = 0  # noqa: N815
    hipErrorNoDevice = 100  # noqa: N815


@pytest.fixture
def hip(monkeypatch):
    """Puts a module like hip-python's, with one MI300X, in its place; the arguments replace its calls."""

    def install(**calls):
        usual = {"hipGetDeviceCount": lambda: (Code.hipSuccess, 1)}
        absent = dict.fromkeys(hip_python.CALLS, raising(RuntimeError("failed to dlsym")))
        module = SimpleNamespace(**(absent | usual | calls))
        monkeypatch.setitem(sys.modules, "hip", SimpleNamespace(hip=module))

    return install


NO_LIBRARY = RuntimeError("failed to dlopen 'b'libamdhip64.so'': cannot open shared object file\nmore\nlines")


@pytest.mark.parametrize(
    ("calls", "said"),
    [({"hipGetDeviceCount": lambda: (Code.hipErrorNoDevice, 0)}, "hipGetDeviceCount says hipErrorNoDevice"),
     ({"hipGetDeviceCount": raising(NO_LIBRARY)}, "libamdhip64"), ({}, "cannot call hipGraphDebugDotPrint")],
)  # fmt: skip
def test_what_hip_cannot_do_is_one_sentence(hip, calls, said):
    hip(**calls)
    with pytest.raises(DumpError) as caught:
        launches.hip_dot(1)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_plain_dump_is_asked_for_with_flags_0(dump, hip):
    """ROCm's older runtimes print a verbose dump into a buffer of 500 bytes, whatever a kernel's name."""
    asked = []

    def print_dot(graph, path, flags):
        asked.append((graph, flags))
        with open(path, "w") as file:
            file.write(dump("hip_plain"))
        return (Code.hipSuccess,)

    hip(hipGraphDebugDotPrint=print_dot)
    assert "fuse_qk_rope" in launches.hip_dot(0x1234)
    assert asked == [(0x1234, 0)]


def test_two_loaded_runtimes_are_an_error_before_a_graph_crosses_over(tmp_path):
    line = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format("/a/libamdhip64.so.7") * 2)
    launches.check_one_runtime(maps)
    maps.write_text(line.format("/a/libamdhip64.so.7") + line.format("/b/libamdhip64.so"))
    with pytest.raises(DumpError, match="two HIP runtimes"):
        launches.check_one_runtime(maps)
