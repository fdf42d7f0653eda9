"""Claims about the options: two fields on vLLM's PassConfig, and the ways in which a user types them."""

import inspect
import json
import pickle

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.benchmarks import latency
from vllm.config import CompilationConfig, PassConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.gate import gate_support
from tests.support.planted import raising
from vllm_aiter_mla import packages
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

ON = {FLAG_FIELD: True, LIMIT_FIELD: 64}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pass_config": {FLAG_FIELD: False, LIMIT_FIELD: None}}])
def test_flag_off_hashes_and_prints_as_without_the_plugin(without_plugin, options):
    assert not without_plugin["plugin"]
    assert gate_support.observed(gate_support.modelless_config(options)) == without_plugin["observed"]


@pytest.mark.slow
@pytest.mark.mutation
def test_mutation_a_hash_that_lists_our_fields_when_off_is_caught(without_plugin, monkeypatch):
    monkeypatch.setattr(patches, "_WithoutFields", lambda config, hidden: config)
    found = gate_support.observed(gate_support.modelless_config())
    assert gate_support.differing(found, without_plugin["observed"]) == ["hash", "compilation_hash", "pass_hash"]


@pytest.mark.slow
def test_a_process_without_the_plugin_unpickles_our_values(without_plugin):
    assert without_plugin["arrived_type"] == "vllm.config.compilation.PassConfig"
    assert {name: without_plugin["arrived"][name] for name in ON} == ON


def test_a_pickle_of_a_process_without_the_plugin_reads_as_off():
    vllm_own = PassConfig()
    for name in ON:
        del vllm_own.__dict__[name]
    arrived = pickle.loads(pickle.dumps(vllm_own))
    assert patches.pass_config_values(arrived) == {FLAG_FIELD: False, LIMIT_FIELD: None}
    assert arrived == PassConfig()
    assert arrived.compute_hash() == PassConfig().compute_hash()


def test_values_pass_through_every_way_a_config_is_built():
    ways = [
        PassConfig(**ON),
        CompilationConfig(pass_config=ON).pass_config,
        TypeAdapter(CompilationConfig).validate_json(json.dumps({"pass_config": ON})).pass_config,
        VllmConfig(compilation_config=CompilationConfig(pass_config=PassConfig(**ON))).compilation_config.pass_config,
        replace(PassConfig(**ON)),
        pickle.loads(pickle.dumps(PassConfig(**ON))),
    ]
    assert [patches.pass_config_values(way) for way in ways] == [ON] * len(ways)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((FLAG_FIELD, value) for value in ("true", 1, None)),
        *((LIMIT_FIELD, value) for value in (True, "8", 0, -1, 8.5)),
    ],
)
def test_a_wrong_value_names_the_option_and_the_value(name, value):
    ways = [
        lambda: PassConfig(**{name: value}),
        lambda: CompilationConfig(pass_config={name: value}),
        lambda: TypeAdapter(CompilationConfig).validate_json(json.dumps({"pass_config": {name: value}})),
    ]
    for way in ways:
        with pytest.raises(ValidationError) as caught:
            way()
        assert name in str(caught.value)
        assert f"input_value={value!r}" in str(caught.value)


def test_equality_and_repr_see_the_fields():
    assert PassConfig(**ON) == PassConfig(**ON) != PassConfig()
    assert PassConfig(**ON) != PassConfig(**{**ON, LIMIT_FIELD: 65})
    assert PassConfig() != "something else"
    assert repr(PassConfig(**ON)).endswith(f"{FLAG_FIELD}=True, {LIMIT_FIELD}=64)")
    assert FLAG_FIELD not in repr(PassConfig())
    assert FLAG_FIELD in repr(CompilationConfig(pass_config=PassConfig(**ON)))
    assert FLAG_FIELD not in repr(CompilationConfig())


def test_the_hash_sees_vllms_fields_too_and_values_and_fingerprint_only_when_set(monkeypatch):
    on, off = PassConfig(**ON).compute_hash(), PassConfig().compute_hash()
    others = (PassConfig(**{**ON, LIMIT_FIELD: 65}), PassConfig(**ON, eliminate_noops=False))
    assert len({on, off, *(other.compute_hash() for other in others)}) == 4
    monkeypatch.setattr(packages, "fingerprint", lambda: "another")
    assert PassConfig().compute_hash() == off
    assert PassConfig(**ON).compute_hash() != on


@pytest.mark.slow
def test_a_failed_self_test_leaves_vllm_behind(without_plugin):
    names = {"__eq__": "vllm_eq", "__repr__": "vllm_repr", "compute_hash": "vllm_hash"}
    vllm_own = {
        name: inspect.getclosurevars(PassConfig.__dict__[name]).nonlocals[inner] for name, inner in names.items()
    }
    patches._undo_pass_config(PassConfig, vllm_own)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patches, "_check_patched_pass_config", raising(RuntimeError("upstream changed")))
            with pytest.raises(RuntimeError, match="upstream changed"):
                patches.extend_pass_config()
        assert gate_support.observed(gate_support.modelless_config()) == without_plugin["observed"]
        with pytest.raises(ValidationError, match=FLAG_FIELD):
            PassConfig(**ON)
    finally:
        patches.extend_pass_config()
    assert patches.pass_config_values(PassConfig(**ON)) == ON


def test_a_field_upstream_already_has_is_left_alone(monkeypatch):
    monkeypatch.delattr(PassConfig, patches._FIELDS_MARK)
    monkeypatch.setattr(patches, "_wrap_methods", lambda cls, added: None)
    upstreams = dict(PassConfig.__dataclass_fields__)
    patches.extend_pass_config()
    assert PassConfig.__dataclass_fields__ == upstreams
    assert getattr(PassConfig, patches._FIELDS_MARK) == ()


@pytest.fixture(scope="module", params=[AsyncEngineArgs.add_cli_args, latency.add_cli_args], ids=["serve", "bench"])
def parse(request):
    parser = FlexibleArgumentParser()
    request.param(parser)
    return lambda *arguments: parser.parse_args(["--model", "m", *arguments])


def as_json(**values):
    return "--compilation-config", json.dumps({"pass_config": values})


def test_json_and_dotted_spellings_are_read(parse):
    wanted = {FLAG_FIELD: True, LIMIT_FIELD: 512}
    dotted = (f"-cc.pass_config.{FLAG_FIELD}=true", f"-cc.pass_config.{LIMIT_FIELD}=512")
    for arguments in (as_json(**wanted), dotted):
        assert patches.pass_config_values(parse(*arguments).compilation_config.pass_config) == wanted


def dotted(name, typed):
    return (f"-cc.pass_config.{name}={typed}",)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        *((dotted(FLAG_FIELD, typed), FLAG_FIELD, typed.strip('"')) for typed in ("1", "yes", '"true"')),
        *((dotted(LIMIT_FIELD, typed), LIMIT_FIELD, typed) for typed in ("0", "-5", "true", "many", "2.5")),
        *((as_json(**{FLAG_FIELD: value}), FLAG_FIELD, repr(value)) for value in ("true", 0)),
        (as_json(**{LIMIT_FIELD: "8"}), LIMIT_FIELD, "'8'"),
        (dotted("fuse_aiter_qk_rope_kv", "true"), "fuse_aiter_qk_rope_kv", "true"),
    ],
)
def test_a_wrong_argument_names_the_option_and_the_value_before_an_engine_starts(parse, capsys, arguments, name, value):
    with pytest.raises(SystemExit):
        parse(*arguments)
    told = capsys.readouterr().err
    assert name in told
    assert value.lower() in told.lower()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"additional_config": {"aiter_mla": {"enabled": "true"}}}, "additional_config.aiter_mla.enabled: "),
        ({"additional_config": {"aiter_mla": {"kernel": "none"}}, "enforce_eager": True}, "aiter_mla.kernel"),
        ({"compilation_config": {"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 8}},
         "additional_config": {"aiter_mla": {"max_token_num": 16}}}, "contradict"),
    ],
    ids=["a wrong value", "with the flag off and eager mode", "two spellings that differ"],
)  # fmt: skip
def test_a_wrong_option_stops_the_config_not_the_engine(mla_model, options, told):
    with pytest.raises(ValidationError, match=told):
        gate_support.vllm_config(mla_model, **options)


def test_a_value_assigned_after_construction_is_checked_too(mla_model):
    compilation = CompilationConfig()
    setattr(compilation.pass_config, LIMIT_FIELD, -1)
    with pytest.raises(ValidationError, match=LIMIT_FIELD):
        gate_support.vllm_config(mla_model, compilation_config=compilation)
