"""What a worker does between loading and its first request, and that nothing of ours takes it down."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from runtime.opcalls import NAME, layer_of
from vllm_aiter_mla import worker
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.report import announce, census
from vllm_aiter_mla.runtime import selfcheck
from vllm_aiter_mla.settings import Settings, SettingsError


class Worker:
    """As much of vLLM's as the hook touches."""

    def __init__(self, pass_: Any, **options: Any) -> None:
        layer = layer_of()
        compilation = layer._vllm_config.compilation_config
        compilation.inductor_compile_config = {} if pass_ is None else {current_platform.pass_key: pass_}
        compilation.static_forward_context = {NAME: layer}
        compilation.cudagraph_capture_sizes = [1, 8, 64]
        compilation.cudagraph_mode = SimpleNamespace(name="FULL")
        self.vllm_config = layer._vllm_config
        self.vllm_config.cache_config.cache_dtype = "auto"
        self.vllm_config.model_config = SimpleNamespace(dtype="torch.bfloat16")
        self.vllm_config.compute_hash = lambda: "k" * 64
        self.vllm_config.additional_config = {"aiter_mla": {"enabled": True} | options}
        self.dummies = 0
        worker.attach(self)

    def load_model(self) -> str:
        return "loaded"

    def compile_or_warm_up_model(self) -> str:
        return "warm"

    def execute_dummy_batch(self) -> None:
        self.dummies += 1
        census.engage(NAME, "reference")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(log, "say", lambda level, text, stacklevel=2: lines.append((level, text)))
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(announce, "cache_folder", lambda: tmp_path)
    return lines


def ours(limit: int = 16) -> AiterMLAPipeline:
    return AiterMLAPipeline(limit=limit, settings=Settings(enabled=True))


class Foreign:
    """A user's pass that happens to have a limit."""

    limit = 5


@pytest.mark.parametrize(
    ("pass_", "options"),
    [(ours(), {"enabled": False}), (None, {}), (Foreign(), {})],
    ids=["the flag is off", "the gate declined", "the gate declined beside a user's pass"],
)
def test_a_worker_whose_fast_path_is_off_is_left_as_it_is(pass_: Any, options: dict[str, Any]) -> None:
    assert set(vars(Worker(pass_, **options))) == {"vllm_config", "dummies"}


def test_loading_starts_a_census_checks_the_kernels_and_keys_the_cache(said, monkeypatch) -> None:
    given: list[Any] = []
    check = selfcheck.check_layers
    monkeypatch.setattr(
        selfcheck, "check_layers", lambda *args, **kwargs: (given.append(kwargs), check(*args, **kwargs))
    )
    census.engage("a layer of the engine before", "aiter")
    pass_ = ours()
    one = Worker(pass_)
    before = pass_.uuid()
    assert one.load_model() == "loaded"
    assert census.current().engaged == {}
    assert given == [{"strict": False, "capture_sizes": [1, 8]}]
    assert pass_.kernels == selfcheck.verdicts({NAME: worker.mla_layers(one.vllm_config)[NAME]})
    assert pass_.uuid() != before


def test_warm_up_runs_a_dummy_batch_only_where_nothing_has_run(said) -> None:
    one = Worker(ours())
    one.load_model()
    assert one.compile_or_warm_up_model() == "warm"
    assert one.dummies == 1
    assert said[-1] == (logging.INFO, "1/1 MLA layers engaged (reference, bf16 KV, decode bucket 1..16)")
    one.compile_or_warm_up_model()
    assert one.dummies == 1


@pytest.mark.parametrize("moment", ["load_model", "compile_or_warm_up_model"])
def test_a_surprise_of_ours_is_a_warning_and_the_worker_goes_on(said, monkeypatch, moment: str) -> None:
    def surprise(*args: Any, **kwargs: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(selfcheck, "check_layers", surprise)
    monkeypatch.setattr(announce, "after_warm_up", surprise)
    assert getattr(Worker(ours()), moment)() in ("loaded", "warm")
    assert [level for level, text in said if "KeyError: 'planted'" in text] == [logging.WARNING]


def test_an_error_of_strict_mode_stops_the_worker(said, monkeypatch) -> None:
    one = Worker(ours(), strict=True)
    one.load_model()
    monkeypatch.setattr(one, "execute_dummy_batch", lambda: None)
    with pytest.raises(SettingsError, match="0/1"):
        one.compile_or_warm_up_model()
