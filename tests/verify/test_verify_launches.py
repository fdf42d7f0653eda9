"""The parser of captured graphs, on dumps of both vendors (tests/verify/data/README.md says where they are from)."""

import pytest

from vllm_aiter_mla.verify.launches import DotError, nodes, of_dot, short, violation

BMM = "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64"
FUSED = "_ZN5aiter44fuse_qk_rope_concat_and_cache_mla_opt_kernelIDF16bhLb0EEEvPKT_S3_PT0_iii"


def test_a_dump_of_cuda_names_kernels_and_what_else_does_work(dump):
    found = nodes(dump("cuda_verbose"))
    assert [kind for kind, _ in found] == ["KERNEL", "KERNEL", "MEMCPY", "MEMSET"]
    assert found[1][1] == "decode_prep_kernel"
    assert found[0][1].startswith("_ZN2at6native29vectorized_elementwise_kernel")


def test_a_dump_of_hip_names_kernels_copies_and_barriers(dump):
    found = nodes(dump("hip_plain"))
    assert [kind for kind, _ in found] == ["KERNEL", "KERNEL", "MEMCPY", "EMPTY"]
    assert found[1][1] == FUSED


def test_windows_line_ends_change_nothing(dump):
    assert nodes(dump("cuda_verbose").replace("\n", "\r\n")) == nodes(dump("cuda_verbose"))


def test_a_node_of_an_unknown_kind_is_counted_not_dropped():
    text = 'digraph dot {\n"graph_0_node_0"[style="solid" shape="record" label="{brand new | 1}"];\n}\n'
    assert nodes(text) == [("UNKNOWN", "")]
    assert of_dot(text) == ("UNKNOWN",)


@pytest.mark.parametrize("text", ["", "not a graph", "digraph dot {\n}\n"])
def test_a_dump_without_nodes_is_an_error_and_no_empty_list(text):
    with pytest.raises(DotError):
        of_dot(text)


def test_barriers_are_no_launches(dump):
    names = of_dot(dump("hip_plain"))
    assert len(names) == 3
    assert names[2] == "MEMCPY"


def test_names_are_shortened_to_what_can_be_read():
    assert short(FUSED) == "aiter::fuse_qk_rope_concat_and_cache_mla_opt_kernel"
    assert short("decode_prep_kernel") == "decode_prep_kernel"
    assert len(short("Cijk_" + "x" * 200)) == 60


def test_one_triton_launch_per_layer_is_expected():
    assert violation("triton", ("decode_prep_kernel",) * 2, layers=2) is None
    assert "2 found" in violation("triton", ("decode_prep_kernel",) * 2, layers=1)


def test_aiter_is_a_bmm_and_one_op():
    assert violation("aiter", (BMM, FUSED), layers=1) is None
    assert violation("aiter", (BMM, "splitk_reduce", FUSED), layers=1) is None
    assert "0 found" in violation("aiter", (BMM,), layers=1)


@pytest.mark.mutation
def test_mutation_a_step_of_four_launches_is_refused(dump):
    vllm_own = (BMM, "rotary_embedding_kernel", "concat_and_cache_mla_kernel", "static_scaled_fp8_quant_kernel")
    assert violation("aiter", vllm_own, layers=1) is not None
    assert violation("triton", vllm_own, layers=1) is not None
    assert violation("aiter", of_dot(dump("hip_plain")), layers=1) is not None, "a copy beside the op"


def test_a_back_end_without_an_entry_is_held_against_a_plain_call():
    assert violation("reference", ("a", "b"), layers=1, budget=2) is None
    assert "1 launches per layer expected" in violation("reference", ("a", "b"), layers=1, budget=1)
    assert violation("somebody's", ("a", "b"), layers=1) is None
