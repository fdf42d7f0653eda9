"""Claims about the ways a user types the options: wrong ones stop before any engine starts, and say which."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.gate import gate_support
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

Parse = Callable[..., argparse.Namespace]


def _serve() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def _bench() -> FlexibleArgumentParser:
    from vllm.benchmarks.latency import add_cli_args

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


@pytest.fixture(scope="module", params=[_serve, _bench], ids=["serve", "bench"])
def parse(request: pytest.FixtureRequest) -> Parse:
    parser = request.param()
    return lambda *arguments: parser.parse_args(["--model", "m", *arguments])


def as_json(**values: Any) -> tuple[str, str]:
    return "--compilation-config", json.dumps({"pass_config": values})


def test_json_and_dotted_spellings_are_read(parse: Parse) -> None:
    wanted = {FLAG_FIELD: True, LIMIT_FIELD: 512}
    dotted = (f"-cc.pass_config.{FLAG_FIELD}=true", f"-cc.pass_config.{LIMIT_FIELD}=512")
    for arguments in (as_json(**wanted), dotted):
        assert patches.pass_config_values(parse(*arguments).compilation_config.pass_config) == wanted


def dotted(name: str, typed: str) -> tuple[str]:
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
def test_a_wrong_argument_names_the_option_and_the_value_before_an_engine_starts(
    parse: Parse, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], name: str, value: str
) -> None:
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
        (
            {
                "compilation_config": {"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 8}},
                "additional_config": {"aiter_mla": {"max_token_num": 16}},
            },
            "contradict",
        ),
    ],
    ids=["a wrong value", "with the flag off and eager mode", "two spellings that differ"],
)
def test_a_wrong_option_stops_the_config_not_the_engine(mla_model: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        gate_support.vllm_config(mla_model, **options)


def test_a_value_assigned_after_construction_is_checked_too(mla_model: Path) -> None:
    from vllm.config import CompilationConfig

    compilation = CompilationConfig()
    setattr(compilation.pass_config, LIMIT_FIELD, -1)
    with pytest.raises(ValidationError, match=LIMIT_FIELD):
        gate_support.vllm_config(mla_model, compilation_config=compilation)
