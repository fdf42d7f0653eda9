"""Claims about the two spellings of the options. Needs neither torch nor vLLM."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_aiter_mla import settings
from vllm_aiter_mla.settings import (
    FLAG_FIELD,
    LIMIT_FIELD,
    DebugSettings,
    Settings,
    SettingsError,
    near_misses,
    resolve_settings,
)

OFF = {FLAG_FIELD: False, LIMIT_FIELD: None}


def ours(**options):
    return {"aiter_mla": options}


@pytest.mark.parametrize(
    ("pass_config", "additional", "wanted"),
    [
        (OFF, {}, Settings()),
        ({}, None, Settings()),
        ({FLAG_FIELD: True, LIMIT_FIELD: 512}, {}, Settings(enabled=True, max_token_num=512)),
        (OFF, ours(enabled=True, max_token_num=512), Settings(enabled=True, max_token_num=512)),
        ({FLAG_FIELD: True}, ours(kernel="triton", strict=True), Settings(enabled=True, kernel="triton", strict=True)),
        ({LIMIT_FIELD: 256}, ours(max_token_num=256), Settings(max_token_num=256)),
        ({LIMIT_FIELD: 256}, ours(max_token_num=None), Settings(max_token_num=256)),
        (OFF, {"gdn_prefill_backend": "triton"}, Settings()),
        (OFF, object(), Settings()),
        (OFF, ours(debug={"rounding": "two"}), Settings(debug=DebugSettings(rounding="two"))),
    ],
)
def test_the_two_spellings_complete_each_other(pass_config, additional, wanted):
    assert resolve_settings(pass_config, additional) == wanted


@pytest.mark.parametrize(
    ("pass_config", "options", "named"),
    [
        ({FLAG_FIELD: True}, {"enabled": False}, (f"{FLAG_FIELD}=true", "enabled=false")),
        ({LIMIT_FIELD: 256}, {"max_token_num": 512}, (f"{LIMIT_FIELD}=256", "max_token_num=512")),
    ],
)
def test_two_options_that_contradict_each_other_are_an_error_that_names_both(pass_config, options, named):
    with pytest.raises(SettingsError, match="contradict") as caught:
        resolve_settings(pass_config, {"aiter_mla": options})
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("enabled", value) for value in ("true", 1, None)),
        *(("max_token_num", value) for value in (True, "8", 8.0, 0, -4)),
        *(("kernel", value) for value in ("cuda", ["aiter"])),
        ("integration", "both"),
        ("measure", 1),
        ("strict", 0),
        ("debug", True),
        ("debug.rounding", 2),
        ("debug.untested_vllm", "yes"),
        ("enable", True),
        ("debug.stop_after", "q_prep_lift"),
        *((f"pass_config.{FLAG_FIELD}", value) for value in ("true", 1)),
        *((f"pass_config.{LIMIT_FIELD}", value) for value in (True, 0)),
    ],
)
def test_a_wrong_key_type_or_range_names_the_option_and_the_value(name, value):
    outer, _, inner = name.partition(".")
    in_pass = outer == "pass_config"
    with pytest.raises(SettingsError) as caught:
        resolve_settings({inner: value}, {}) if in_pass else resolve_settings(
            OFF, ours(**{outer: {inner: value} if inner else value})
        )
    assert (name if in_pass else f"additional_config.aiter_mla.{name}") in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_typing_error_is_answered_with_the_nearest_option():
    with pytest.raises(SettingsError, match="did you mean 'enabled'"):
        resolve_settings(OFF, ours(enabeld=True))
    with pytest.raises(SettingsError, match="did you mean 'rounding'"):
        resolve_settings(OFF, ours(debug={"roundin": "two"}))


@pytest.mark.parametrize("value", [None, True, "on", ["enabled"]])
def test_options_that_are_not_a_mapping_are_an_error(value):
    with pytest.raises(SettingsError, match=r"additional_config\.aiter_mla: .*mapping"):
        resolve_settings(OFF, {"aiter_mla": value})


def test_options_without_the_switch_are_reported_as_unused():
    assert settings.non_default_options(resolve_settings(OFF, ours(kernel="triton", max_token_num=4))) == (
        "max_token_num",
        "kernel",
    )
    assert settings.non_default_options(resolve_settings(OFF, {})) == ()


def test_settings_survive_pickling_and_cannot_be_changed():
    before = Settings(enabled=True, max_token_num=7, debug=DebugSettings(rounding="two"))
    assert pickle.loads(pickle.dumps(before)) == before
    with pytest.raises(AttributeError):
        before.enabled = False


_settings = st.builds(
    Settings,
    enabled=st.booleans(),
    max_token_num=st.none() | st.integers(1, 10**6),
    kernel=st.sampled_from(settings.KERNELS),
    measure=st.booleans(),
    strict=st.booleans(),
    debug=st.builds(
        DebugSettings,
        rounding=st.sampled_from(settings.ROUNDINGS),
        untested_vllm=st.booleans(),
    ),
)


@given(_settings)
def test_additional_config_can_spell_every_setting(wanted):
    assert resolve_settings(OFF, ours(**{**vars(wanted), "debug": vars(wanted.debug)})) == wanted


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["auto", "", "x"])
_json = _scalars | st.lists(_scalars, max_size=2) | st.dictionaries(st.sampled_from(["rounding", "x"]), _scalars)
_keys = st.sampled_from(["enabled", "max_token_num", "kernel", "measure", "strict", "debug", "x", 3])


@given(st.dictionaries(_keys, _json, max_size=4))
def test_any_input_is_either_read_or_rejected_by_name(options):
    try:
        read = resolve_settings(OFF, {"aiter_mla": options})
    except SettingsError as error:
        assert "additional_config.aiter_mla." in str(error)  # noqa: PT017
        return
    assert type(read.enabled) is bool
    assert read.max_token_num is None or (type(read.max_token_num) is int and read.max_token_num > 0)


def test_importing_the_pure_modules_imports_neither_torch_nor_vllm():
    program = (
        "import sys, vllm_aiter_mla, vllm_aiter_mla.plugin\n"
        "from vllm_aiter_mla import admission, files, packages, settings\n"
        "from vllm_aiter_mla.kernels.aiter.op import locate_aiter\n"
        "packages.fingerprint(), files.stamp('plan'), locate_aiter()\n"
        "print({'torch', 'vllm', 'aiter'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


NEAR = ["aiter-mla", "aitermla", "AITER_MLA", "aiter mla", "vllm_aiter_mla", "vllm-aiter-mla", "Aiter.MLA", "aiter_ml",
        "aitre_mla", FLAG_FIELD, LIMIT_FIELD, "fuse_aiter_qk_rope_kvcache"]  # fmt: skip
FAR = ["aiter", "mla", "another_plugin", "ascend_scheduler_config", "vllm", "", 3, None]


@pytest.mark.parametrize("key", NEAR)
@pytest.mark.parametrize("is_enabled", [True, False])
def test_near_miss_of_the_namespace_or_the_flag_is_found(key, is_enabled):
    assert near_misses({key: {}, "aiter_mla": {}}, is_enabled) == (key,)


@pytest.mark.parametrize("key", ["strict", "kernel", "measure", "debug"])
def test_an_option_beside_the_namespace_is_a_near_miss_where_the_plugin_is_on(key):
    """A canary that were strict by no more than its own belief; with the flag off the key may be another plugin's."""
    assert near_misses({key: True}, True) == (key,)
    assert near_misses({key: True}, False) == ()


def test_near_miss_is_no_other_key_and_no_other_object():
    for other in dict.fromkeys([*FAR, "aiter_mla"]), object(), None:
        assert near_misses(other, True) == ()


@pytest.mark.mutation
def test_mutation_near_miss_by_exact_letters_only_is_caught(monkeypatch):
    monkeypatch.setattr(settings.difflib, "get_close_matches", lambda *found, **how: [])
    with pytest.raises(AssertionError, match=r"^assert \(\) == \('aitre_mla',\)"):
        test_near_miss_of_the_namespace_or_the_flag_is_found("aitre_mla", True)
