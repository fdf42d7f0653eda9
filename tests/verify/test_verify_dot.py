"""The parser of captured graphs, on dumps of both vendors (tests/verify/data/README.md says where they are from)."""

import pytest

from vllm_aiter_mla.verify import dot
from vllm_aiter_mla.verify.census import Census, short, violation

BMM = "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64"
FUSED = "_ZN5aiter44fuse_qk_rope_concat_and_cache_mla_opt_kernelIDF16bhLb0EEEvPKT_S3_PT0_iii"


def kinds(text):
    return [node.kind for node in dot.parse(text)]


def test_verbose_cuda_dump_names_kernels_and_what_else_does_work(dump):
    nodes = dot.parse(dump("cuda_verbose"))
    assert [node.kind for node in nodes] == ["KERNEL", "KERNEL", "MEMCPY", "MEMSET"]
    assert nodes[1].name == "decode_prep_kernel"
    assert nodes[0].name.startswith("_ZN2at6native29vectorized_elementwise_kernel")
    assert nodes[0].launch == "1,128,0"


def test_plain_cuda_dump_names_kernels_and_child_graphs(dump):
    nodes = dot.parse(dump("cuda_plain"))
    assert [(node.kind, node.name) for node in nodes] == [
        ("KERNEL", "decode_prep_kernel"),
        ("CHILD GRAPH", ""),
        ("KERNEL", "_Z4tailPfS_"),
    ]


def test_plain_hip_dump_names_kernels_copies_and_barriers(dump):
    nodes = dot.parse(dump("hip_plain"))
    assert [node.kind for node in nodes] == ["KERNEL", "KERNEL", "MEMCPY", "EMPTY"]
    assert nodes[1].name == FUSED


@pytest.mark.parametrize("name", ["hip_verbose", "hip_verbose_remainder"])
def test_verbose_hip_dump_names_kernels(dump, name):
    nodes = dot.parse(dump(name))
    assert [(node.kind, node.name) for node in nodes] == [("KERNEL", BMM), ("KERNEL", "decode_prep_kernel")]
    assert nodes[0].launch.startswith("(16,8,1),(256,1,1)")


def test_hip_dump_with_an_unclosed_attribute_is_read(dump):
    (node,) = dot.parse(dump("hip_kernel_params"))
    assert (node.kind, node.name) == ("KERNEL", "decode_prep_kernel")


def test_windows_line_ends_change_nothing(dump):
    assert kinds(dump("cuda_verbose").replace("\n", "\r\n")) == kinds(dump("cuda_verbose"))


def test_a_node_of_an_unknown_kind_is_counted_not_dropped():
    text = 'digraph dot {\n"graph_0_node_0"[style="solid" shape="record" label="{brand new | 1}"];\n}\n'
    assert kinds(text) == ["UNKNOWN"]
    assert Census.of_dot(text).launches == 1


@pytest.mark.parametrize("text", ["", "not a graph", "digraph dot {\n}\n"])
def test_a_dump_without_nodes_is_an_error_and_no_empty_census(text):
    with pytest.raises(dot.DotError):
        Census.of_dot(text)


def test_barriers_are_no_launches(dump):
    census = Census.of_dot(dump("hip_plain"))
    assert census.launches == 3
    assert census.others == ("MEMCPY",)


def test_names_are_shortened_to_what_can_be_read():
    assert short(FUSED) == "aiter::fuse_qk_rope_concat_and_cache_mla_opt_kernel"
    assert short("decode_prep_kernel") == "decode_prep_kernel"
    assert len(short("Cijk_" + "x" * 200)) == 60


def test_one_triton_launch_per_layer_is_expected():
    assert violation("triton", Census(("decode_prep_kernel",) * 2), layers=2) is None
    assert "2 found" in violation("triton", Census(("decode_prep_kernel",) * 2), layers=1)


def test_aiter_is_a_bmm_and_one_op():
    assert violation("aiter", Census((BMM, FUSED)), layers=1) is None
    assert violation("aiter", Census((BMM, "splitk_reduce", FUSED)), layers=1) is None
    assert "0 found" in violation("aiter", Census((BMM,)), layers=1)


@pytest.mark.mutation
def test_mutation_a_step_of_four_launches_fails_the_census(dump):
    stock = Census((BMM, "rotary_embedding_kernel", "concat_and_cache_mla_kernel", "static_scaled_fp8_quant_kernel"))
    assert violation("aiter", stock, layers=1) is not None
    assert violation("triton", stock, layers=1) is not None
    assert violation("aiter", Census.of_dot(dump("hip_plain")), layers=1) is not None, "a copy beside the op"


def test_a_back_end_without_an_entry_is_held_against_a_plain_call():
    assert violation("reference", Census(("a", "b")), layers=1, budget=2) is None
    assert "1 launches per layer expected" in violation("reference", Census(("a", "b")), layers=1, budget=1)
    assert violation("somebody's", Census(("a", "b")), layers=1) is None
