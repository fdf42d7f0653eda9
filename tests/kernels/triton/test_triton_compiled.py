"""The compiled code, without a GPU: what it is made of on gfx942, gfx950 and sm90, one process each."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from tools import aot, isa
from vllm_aiter_mla.kernels.triton.tiles import TABLE, allowed

pytestmark = pytest.mark.slow
TARGETS = ("gfx942", "gfx950", "sm90")


@pytest.fixture(scope="module", params=["--served", pytest.param("", marks=pytest.mark.wide)], ids=["served", "every"])
def reports(isa_report, tmp_path_factory, request):
    path = tmp_path_factory.mktemp("isa") / "isa.json"
    done = isa_report("--json", str(path), *filter(None, [request.param]))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {report["target"]: report["rows"] for report in json.loads(path.read_text())}
    return aot.served if request.param else aot.variants, found


@pytest.mark.parametrize("name", TARGETS)
def test_triton_variants_keep_their_bounds_and_use_fp8_where_their_labels_say_so(reports, name):
    chosen, target = reports[0], aot.TARGETS[name]
    rows = {row["label"]: row for row in reports[1][name]}
    assert rows.keys() == {variant.label for variant in chosen(target)}
    assert [row["breaches"] for row in rows.values() if row["breaches"]] == []
    for label, row in rows.items():
        found, over_fp8 = row["figures"], "W-fp8" in label
        assert (found["fp8_conversions"] > 0) == (" fp8 " in label or over_fp8)
        # The kernel asks for float32 sums, and then Triton multiplies fp8 on Hopper in fp16.
        assert found["fp8_matrix"] == (found["matrix"] if over_fp8 and name != "sm90" else 0), label
        assert found["scaled_matrix"] == (found["matrix"] if "W-mxfp4" in label else 0), label
    formats = {"plain", "fp8", "mxfp4"} if name == "gfx950" else {"plain", "fp8"}
    for tile in allowed(name) if chosen is aot.variants else {entry.tile.label for entry in TABLE[name]}:
        over = {variant.weight for variant in chosen(target) if variant.tile.label == tile}
        assert over == formats, f"{tile}: what serving or tuning may take, over each format of weight"


def test_triton_what_is_compiled_has_each_pointer_hint_and_what_is_served_the_large_cache():
    for name, target in aot.TARGETS.items():
        table = [variant for variant in aot.variants(target) if variant not in aot.tuned(target)]
        small, large = ({v.label[:-5] for v in table if v.label.endswith(end)} for end in ("<2GiB", ">2GiB"))
        assert large == (set() if name == "sm90" else small)
        cache = "<2GiB" if name == "sm90" else ">2GiB"
        assert {v.label for v in aot.served(target)} == {label + cache for label in small}, "served with a large cache"
        assert sum(v.weight == "mxfp4" for v in table) == (12 if name == "gfx950" else 0)


@pytest.mark.mutation
def test_mutation_served_variants_with_a_small_cache_are_caught(monkeypatch):
    served = aot.served
    monkeypatch.setattr(aot, "served", lambda target: [replace(one, pointer_hint=True) for one in served(target)])
    with pytest.raises(AssertionError, match="served with a large cache"):
        test_triton_what_is_compiled_has_each_pointer_hint_and_what_is_served_the_large_cache()


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("arch", "fp8", "told"),
    [
        pytest.param(
            "gfx942",
            "fp8e4nv",
            ("hardware fp8 conversions expected, 0 found", "fp8 matrix instructions expected, 0 found"),
            marks=pytest.mark.wide,  # half a minute
        ),
        ("sm90", "fp8e4b8", ("BROKEN: failed:", "fp8e4b8")),  # the compiler names the type
    ],
)
def test_triton_mutation_software_fp8_cast_breaks_a_bound_and_exits_1(isa_report, arch, fp8, told):
    done = isa_report("--arch", arch, "--fp8-type", fp8)
    assert done.returncode == 1
    assert all(part in done.stdout for part in told), done.stdout


@pytest.mark.mutation
def test_triton_mutation_lost_alignment_hint_breaks_a_bound():
    """Without divisibility by 16 on the strides the loads narrow; the gate must see it."""
    plant = (
        "from tools import aot, isa\n"
        "whole = aot._argument\n"
        "def without(*given):\n"
        "    kind, hints = whole(*given)\n"
        "    return kind, [hint for hint in hints if hint[0] != 'tt.divisibility']\n"
        "aot._argument = without\n"
        "target = aot.TARGETS['gfx942']; variant = aot.variants(target)[0]\n"
        "print(isa.breaches(target, variant, isa.figures(target, variant, aot.compile_variant(target, variant))))\n"
    )
    done = subprocess.run([sys.executable, "-c", plant], capture_output=True, text=True, check=True)
    assert "16-byte loads of q and the weight expected" in done.stdout


SHAPES = """
import sys
from tools import aot
from vllm_aiter_mla.kernels.triton import kernel
target = aot.TARGETS[sys.argv[1]]
plain = aot.variants(target)[0]
fp8 = target.fp8_type
acts = {name: "fp16" for name in ("q_ptr", "k_pe_ptr", "kv_c_ptr", "w_ptr", "cos_sin_ptr")}
stored, tiny = {"cache_ptr": fp8, "out_ptr": fp8}, {"P": 16, "R": 16, "L": 16, "BLOCK_L": 16}
over_fp8, over_mxfp4 = (aot.Variant(plain.tile, 16, weight_major="P", weight=form) for form in ("fp8", "mxfp4"))
shapes = [
    (plain, {"Q_FP8_MAX": 0.0}, {"cache_ptr": fp8}),
    (plain, {}, acts | stored),
    (plain, {"Q_FP8_MAX": 0.0, "KV_FP8_MAX": 0.0}, acts | {"cache_ptr": "fp16", "out_ptr": "fp16"}),
    (plain, {"BLOCK_SIZE": 1, "N": 1}, stored),
    (plain, {"BLOCK_SIZE": 48, "N": 3}, stored),
    (plain, {"P": 256, "R": 128, "L": 1024}, stored),
    (plain, tiny, stored),
    (plain, tiny | {"IS_NEOX": True}, stored),
    (plain, {"P": 192}, stored),
    (over_fp8, {"P": 192}, stored | {"w_ptr": fp8}),
    (over_fp8, {"P": 32, "Q_FP8_MAX": 0.0}, {"cache_ptr": fp8, "w_ptr": fp8}),
    (over_fp8, {}, acts | stored | {"w_ptr": fp8}),
]
if target.name == "gfx950":
    shapes.append((over_mxfp4, {"P": 512, "L": 1024}, stored | aot.MXFP4_TYPES))
    shapes.append((over_mxfp4, {"Q_FP8_MAX": 0.0, "KV_FP8_MAX": 0.0, "N": 1}, aot.MXFP4_TYPES))
for variant, changes, types in shapes:
    aot.compile_kernel(target, kernel.decode_prep_kernel, aot.constants(target, variant) | changes, types, plain.tile)
print("compiled")
"""


@pytest.mark.parametrize(
    "name", ["gfx942", *(pytest.param(name, marks=pytest.mark.wide) for name in TARGETS if name != "gfx942")]
)
def test_triton_other_dtypes_and_widths_compile(name):
    done = subprocess.run([sys.executable, "-c", SHAPES, name], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--arch", "gfx1100"), "argument --arch: invalid choice: 'gfx1100'"),
        (("--fp8-type", "nonsense"), "argument --fp8-type: invalid choice: 'nonsense'"),
        (("--json", "no/such/x.json"), "--json no/such/x.json: its folder does not exist"),
        (("--json", "."), "--json .: is a folder"),
    ],
)
def test_triton_report_with_a_wrong_option_names_it_and_exits_2(isa_report, arguments, told):
    done = isa_report(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("before", "interpret", "says"), [("gfx942", "0", "one for sm90"), ("sm90", "1", "cross")])
def test_triton_process_of_another_card_or_that_interprets_does_not_compile(monkeypatch, before, interpret, says):
    monkeypatch.setattr(aot, "_arch_of_process", [before])
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    target = aot.TARGETS["sm90"]
    with pytest.raises(RuntimeError, match=says):
        aot.compile_variant(target, aot.variants(target)[0])


LISTING = """
\tbuffer_load_dwordx4 v[0:3], v0, s[0:3], 0
\tglobal_store_byte v[0:1], v2, off
\tv_cvt_pk_fp8_f32 v0, v1, v2
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], 0
; Occupancy: 5
    .vgpr_count:     88
    .vgpr_spill_count: 2
    .sgpr_spill_count: 1
    .private_segment_fixed_size: 16
"""


def test_triton_listing_is_read_and_each_breach_named():
    found = isa.amdgcn_figures(LISTING, "gfx942", 65536, 4)
    assert (found.registers, found.spills, found.scratch, found.byte_stores) == (88, 3, 16, 1)
    assert found.occupancy == 1, "64 KiB of LDS leave one workgroup of four waves, one per SIMD"
    target = aot.TARGETS["gfx942"]
    variant = aot.variants(target)[0]
    text = " ".join(isa.breaches(target, variant, found))
    for part in ("hardware fp8", "3 spilled", "16 bytes of scratch", "16-byte loads", "1 single-byte stores"):
        assert part in text
    assert "1 waves by 65536 bytes of LDS and 88 registers, at least 4" in text
    without = isa.amdgcn_figures(LISTING.replace("mfma", "fma"), "gfx942", 0, 4)
    assert "no matrix instruction" in isa.breaches(target, variant, without)
    with pytest.raises(ValueError, match="vgpr_count"):
        isa.amdgcn_figures(LISTING.replace(".vgpr_count", ".other"), "gfx942", 0, 4)


@pytest.mark.parametrize(("selects", "crossed"), [("op_sel:[0,1,0]", True), ("op_sel_hi:[0,1,1]", False)])
@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_triton_multiply_adds_that_were_found_wrong_on_gfx950_break_a_bound_there(name, selects, crossed):
    target = aot.TARGETS[name]
    listing = LISTING + f"\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] {selects}\n"
    found = isa.amdgcn_figures(listing, name, 0, 4)
    told = any("v_pk_fma_f32" in breach for breach in isa.breaches(target, aot.variants(target)[0], found))
    assert (found.crossed_fmas, told) == (crossed, crossed and name == "gfx950")


def test_triton_listing_over_mxfp4_without_the_scaled_instruction_breaks_a_bound():
    target = aot.TARGETS["gfx950"]
    (variant, *_) = [variant for variant in aot.variants(target) if variant.weight == "mxfp4"]
    scaled = LISTING.replace("v_mfma_f32_32x32x8_bf16", "v_mfma_scale_f32_32x32x64_f8f6f4")
    for text, missing in ((LISTING, True), (scaled, False)):
        found = isa.amdgcn_figures(text, "gfx950", 0, 4)
        said = "1 scaled matrix instructions expected, 0 found" in isa.breaches(target, variant, found)
        assert (found.scaled_matrix, said) == (1 - missing, missing)
