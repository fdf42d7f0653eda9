"""Claims about the two spellings of the options. Needs neither torch nor vLLM."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_aiter_mla import settings
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD, DebugSettings, Settings, SettingsError, resolve

OFF: dict[str, object] = {FLAG_FIELD: False, LIMIT_FIELD: None}


def ours(**options: Any) -> dict[str, Any]:
    return {"aiter_mla": options}


def test_nothing_given_is_off_with_defaults() -> None:
    assert resolve(OFF, {}) == Settings() == resolve({}, None)
    assert not Settings().enabled


def test_either_spelling_switches_it_on() -> None:
    assert resolve({FLAG_FIELD: True, LIMIT_FIELD: 512}, {}) == Settings(enabled=True, max_token_num=512)
    assert resolve(OFF, ours(enabled=True, max_token_num=512)) == Settings(enabled=True, max_token_num=512)


def test_spellings_complete_each_other() -> None:
    merged = resolve({FLAG_FIELD: True, LIMIT_FIELD: None}, ours(max_token_num=64, kernel="triton", strict=True))
    assert merged == Settings(enabled=True, max_token_num=64, kernel="triton", strict=True)


def test_a_default_false_in_pass_config_does_not_contradict_enabled() -> None:
    assert resolve(OFF, ours(enabled=True)).enabled


def test_flag_true_and_enabled_false_is_an_error_that_names_both() -> None:
    with pytest.raises(SettingsError, match=rf"{FLAG_FIELD}=true.*enabled=false"):
        resolve({FLAG_FIELD: True}, ours(enabled=False))


def test_two_different_limits_are_an_error_that_names_both_values() -> None:
    with pytest.raises(SettingsError, match=rf"{LIMIT_FIELD}=256.*max_token_num=512"):
        resolve({FLAG_FIELD: True, LIMIT_FIELD: 256}, ours(max_token_num=512))


def test_two_equal_limits_are_one() -> None:
    assert resolve({LIMIT_FIELD: 256}, ours(max_token_num=256)).max_token_num == 256


def test_a_null_limit_counts_as_unset() -> None:
    assert resolve({LIMIT_FIELD: 256}, ours(max_token_num=None)).max_token_num == 256


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"enabled": "true"}, "enabled", "'true'"),
        ({"enabled": 1}, "enabled", "1"),
        ({"enabled": None}, "enabled", "None"),
        ({"max_token_num": True}, "max_token_num", "True"),
        ({"max_token_num": "8"}, "max_token_num", "'8'"),
        ({"max_token_num": 8.0}, "max_token_num", "8.0"),
        ({"max_token_num": 0}, "max_token_num", "0"),
        ({"max_token_num": -4}, "max_token_num", "-4"),
        ({"kernel": "cuda"}, "kernel", "'cuda'"),
        ({"kernel": ["aiter"]}, "kernel", "['aiter']"),
        ({"strict": 0}, "strict", "0"),
        ({"debug": True}, "debug", "True"),
        ({"debug": {"stop_after": "fusion"}}, "debug.stop_after", "'fusion'"),
        ({"debug": {"rounding": 2}}, "debug.rounding", "2"),
        ({"debug": {"untested_vllm": "yes"}}, "debug.untested_vllm", "'yes'"),
    ],
)
def test_wrong_type_or_range_names_the_option_and_the_value(options: dict[str, Any], name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(OFF, {"aiter_mla": options})
    assert f"additional_config.aiter_mla.{name}" in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("values", "shown"),
    [({FLAG_FIELD: "true"}, "'true'"), ({FLAG_FIELD: 1}, "1"), ({LIMIT_FIELD: True}, "True"), ({LIMIT_FIELD: 0}, "0")],
)
def test_wrong_pass_config_value_names_the_option_and_the_value(values: dict[str, object], shown: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(values, {})
    assert next(iter(values)) in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize("path", [{"enable": True}, {"debug": {"stop": "q_prep_lift"}}])
def test_unknown_key_is_an_error_that_lists_the_known_ones(path: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"unknown option.*known: "):
        resolve(OFF, {"aiter_mla": path})


def test_a_typing_error_is_answered_with_the_nearest_option() -> None:
    with pytest.raises(SettingsError, match="did you mean 'enabled'"):
        resolve(OFF, ours(enabeld=True))


@pytest.mark.parametrize("value", [None, True, "on", ["enabled"]])
def test_options_that_are_no_mapping_are_an_error(value: object) -> None:
    with pytest.raises(SettingsError, match=r"additional_config\.aiter_mla: expected a mapping"):
        resolve(OFF, {"aiter_mla": value})


def test_other_peoples_additional_config_is_left_alone() -> None:
    assert resolve(OFF, {"gdn_prefill_backend": "triton"}) == Settings()
    assert resolve(OFF, object()) == Settings()


def test_debug_settings_are_read() -> None:
    debug = {"stop_after": "q_prep_lift", "rounding": "two"}
    assert resolve(OFF, ours(enabled=True, debug=debug)).debug == DebugSettings("q_prep_lift", "two")


def test_options_without_the_switch_are_reported_as_unused() -> None:
    assert settings.unused_options(resolve(OFF, ours(kernel="triton", max_token_num=4))) == ("max_token_num", "kernel")
    assert settings.unused_options(resolve(OFF, ours(enabled=True, kernel="triton"))) == ()


def test_settings_survive_pickling_and_cannot_be_changed() -> None:
    before = Settings(enabled=True, max_token_num=7, debug=DebugSettings(rounding="two"))
    assert pickle.loads(pickle.dumps(before)) == before
    with pytest.raises(AttributeError):
        before.enabled = False  # type: ignore[misc]


_settings = st.builds(
    Settings,
    enabled=st.booleans(),
    max_token_num=st.none() | st.integers(1, 10**6),
    kernel=st.sampled_from(settings.KERNELS),
    strict=st.booleans(),
    debug=st.builds(
        DebugSettings,
        stop_after=st.none() | st.sampled_from(settings.STOP_AFTER),
        rounding=st.sampled_from(settings.ROUNDINGS),
        untested_vllm=st.booleans(),
    ),
)


@given(_settings)
def test_additional_config_can_spell_every_setting(wanted: Settings) -> None:
    spelt = ours(
        enabled=wanted.enabled,
        max_token_num=wanted.max_token_num,
        kernel=wanted.kernel,
        strict=wanted.strict,
        debug=vars(wanted.debug),
    )
    assert resolve(OFF, spelt) == wanted


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["auto", "", "x"])
_json = _scalars | st.lists(_scalars, max_size=2) | st.dictionaries(st.sampled_from(["rounding", "x"]), _scalars)
_keys = st.sampled_from(["enabled", "max_token_num", "kernel", "strict", "debug", "x"])


@given(st.dictionaries(_keys, _json, max_size=4))
def test_any_input_is_either_read_or_refused_by_name(options: dict[str, Any]) -> None:
    skipped = ""
    read = Settings()
    try:
        read = resolve(OFF, {"aiter_mla": options})
    except SettingsError as error:
        skipped = str(error)
    assert not skipped or "additional_config.aiter_mla." in skipped
    assert type(read.enabled) is bool
    assert read.max_token_num is None or (type(read.max_token_num) is int and read.max_token_num > 0)


def test_importing_the_pure_modules_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, vllm_aiter_mla, vllm_aiter_mla.plugin\n"
        "from vllm_aiter_mla import admission, decode limit, fingerprint, settings\n"
        "fingerprint.fingerprint()\n"
        "sys.exit(' '.join({'torch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).stderr.strip() == b""


@pytest.mark.parametrize("value", ["auto", "as-is", "per-head", "opt", 64])
def test_aiter_view_is_a_name_or_a_number_of_tokens(value: object) -> None:
    assert resolve({}, {"aiter_mla": {"aiter_view": value}}).aiter_view == value


@pytest.mark.parametrize("value", ["fast", 0, -1, True, 1.5, None])
def test_a_wrong_aiter_view_names_the_option_and_the_value(value: object) -> None:
    with pytest.raises(SettingsError, match=r"additional_config\.aiter_mla\.aiter_view") as caught:
        resolve({}, {"aiter_mla": {"aiter_view": value}})
    assert str(value) in str(caught.value)
