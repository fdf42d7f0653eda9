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


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        *((FLAG_FIELD, typed) for typed in ("1", "yes", '"true"')),
        *((LIMIT_FIELD, typed) for typed in ("0", "-5", "true", "many", "2.5")),
    ],
)
def test_a_wrong_dotted_value_names_the_option_before_an_engine_starts(
    parse: Parse, capsys: pytest.CaptureFixture[str], name: str, typed: str
) -> None:
    with pytest.raises(SystemExit):
        parse(f"-cc.pass_config.{name}={typed}")
    told = capsys.readouterr().err
    assert name in told
    assert typed.strip('"').lower() in told.lower()


@pytest.mark.parametrize(("name", "value"), [(FLAG_FIELD, "true"), (FLAG_FIELD, 0), (LIMIT_FIELD, "8")])
def test_a_wrong_json_value_names_the_option_before_an_engine_starts(
    parse: Parse, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    with pytest.raises(SystemExit):
        parse(*as_json(**{name: value}))
    told = capsys.readouterr().err
    assert name in told
    assert repr(value) in told


def test_a_misspelt_option_is_an_error(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("-cc.pass_config.fuse_aiter_qk_rope_kv=true")
    assert "fuse_aiter_qk_rope_kv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"enabled": "true"}, "additional_config.aiter_mla.enabled: "),
        ({"enable": True}, "additional_config.aiter_mla.enable"),
        ({"max_token_num": 0}, "additional_config.aiter_mla.max_token_num"),
        ({"kernel": "cuda"}, "additional_config.aiter_mla.kernel"),
    ],
)
def test_wrong_additional_config_stops_the_config_not_the_engine(
    mla_model: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        gate_support.vllm_config(mla_model, additional_config={"aiter_mla": options})
    assert told in str(caught.value)


def test_two_spellings_that_differ_stop_the_config(mla_model: Path) -> None:
    with pytest.raises(ValidationError, match="contradict"):
        gate_support.vllm_config(
            mla_model,
            compilation_config={"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 8}},
            additional_config={"aiter_mla": {"max_token_num": 16}},
        )


def test_a_value_assigned_after_construction_is_checked_too(mla_model: Path) -> None:
    from vllm.config import CompilationConfig

    compilation = CompilationConfig()
    setattr(compilation.pass_config, LIMIT_FIELD, -1)
    with pytest.raises(ValidationError, match=LIMIT_FIELD):
        gate_support.vllm_config(mla_model, compilation_config=compilation)


def test_a_bad_option_is_an_error_even_with_the_flag_off_and_eager_mode(mla_model: Path) -> None:
    with pytest.raises(ValidationError, match="kernel"):
        gate_support.vllm_config(mla_model, enforce_eager=True, additional_config={"aiter_mla": {"kernel": "none"}})
