"""Claims about `replace()`, which vLLM calls for drafts and parts of a model, and about options that are off."""

import ast
import copy
import logging
import pickle
from pathlib import Path

import pytest
import vllm
from vllm.compilation.backends import VllmBackend
from vllm.config.utils import replace
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.gate.gate_support import ATTENTION_OPS, ON, PASSES, WHOLE, compile_options, pass_of
from vllm_aiter_mla import gate
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

OFF = {"aiter_mla": {"enabled": False}}
STRICT = {"aiter_mla": {"enabled": True, "strict": True}}


# An engaged config is left alone: what the gate decided by stays as it was.

DECIDES = {"scheduler_config", "additional_config", "compilation_config", "vllm_config"}
"""The parts of a config by which the gate decides, besides those of the model, its cache and its parallelism."""


def replaced_fields(source):
    """Yield, for each call of vLLM's ``replace`` in a module's source, the line and what the call replaces.

    A call whose arguments cannot be read, as with ``**changes``, replaces None.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "replace":
            given = {keyword.arg for keyword in node.keywords}
            # Of strings and of other dataclasses there are more: a VllmConfig is named so wherever vLLM has one.
            first = ast.unparse(node.args[0]) if node.args else ""
            if "vllm_config" in first or first in ("self", "config", "base"):
                yield node.lineno, given


@pytest.mark.slow
def test_vllm_never_replaces_what_the_gate_decided_by():
    """Read in the installed release: else an engaged config would have to be decided again."""
    root, calls = Path(vllm.__file__).parent, 0
    for path in root.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "replace(" not in source or "vllm_config" not in source:
            continue
        for line, given in replaced_fields(source):
            calls += 1
            assert not given & DECIDES, f"{path.relative_to(root)}:{line} replaces {given & DECIDES}"
    assert calls >= 5, "the calls are written in another way now: read them again"


@pytest.mark.mutation("I5")
def test_mutation_a_release_that_replaces_a_scheduler_config_is_noticed():
    source = "def f(vllm_config):\n    return replace(vllm_config, scheduler_config=other, model_config=draft)"
    assert [given & DECIDES for _, given in replaced_fields(source)] == [{"scheduler_config"}]


def is_said_once(config, said):
    """vLLM's engine process finishes the config again that it was sent."""
    built = config(additional_config=ON)
    lines = list(said)
    assert lines
    arrived = pickle.loads(pickle.dumps(built))
    log._said.clear()
    arrived.__post_init__()
    assert said == lines, "the engine's process says it again"


def test_an_engaged_config_is_announced_once_for_all_processes(config, said):
    is_said_once(config, said)


@pytest.mark.mutation("I8")
def test_mutation_an_engaged_config_that_each_process_announces_is_caught(config, said, monkeypatch):
    monkeypatch.setattr(compat_config, "is_decided", lambda vllm_config: False)
    with pytest.raises(AssertionError, match="says it again"):
        is_said_once(config, said)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config),
        lambda config: replace(config, model_config=copy.copy(config.model_config)),
        lambda config: replace(config, speculative_config=None),
        copy.deepcopy,
    ],
    ids=["same", "model", "no drafts", "copied"],
)
def test_an_engaged_config_is_left_alone(config, said, change):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    built = config(additional_config=ON, speculative_config=drafts, compilation_config=WHOLE)
    before, lines = compile_options(built), list(said)
    again = change(built)
    assert pass_of(again).limit == 64
    assert {**compile_options(again), "slot": None} == {**before, "slot": None}
    assert said == lines


def test_a_dense_draft_next_to_a_skipped_target_adds_no_reason_of_its_own(config, dense_model, said):
    built = config(additional_config=PASSES)
    assert len(said.at(logging.WARNING)) == 1
    built.compilation_config.static_forward_context["layers.0"] = object()
    replace(built, model_config=dense_model)
    assert len(said.at(logging.WARNING)) == 1


@pytest.mark.parametrize(
    ("flag", "target", "draft"),
    [
        (ON, "ROCM_AITER_MLA", "TRITON_MLA"),
        (STRICT, "ROCM_AITER_MLA", "TRITON_MLA"),
        (ON, "TRITON_MLA", "ROCM_AITER_MLA"),
    ],
    ids=["skipped", "skipped in strict mode", "admitted next to a skipped target"],
)
def test_a_draft_with_another_attention_changes_nothing_once_the_target_is_built(
    config, said, monkeypatch, flag, target, draft
):
    """vLLM's compiler holds a copy of the options, and the draft's config keeps the target's model."""
    monkeypatch.setattr(compat_config, "platform_facts", lambda one: {"attention": one.attention_config.backend.name})
    built = config(additional_config=flag, attention_backend=target)
    had, lines, compiler = compile_options(built), list(said), VllmBackend(built)
    built.compilation_config.static_forward_context["layers.0"] = object()
    replace(built, attention_config=replace(built.attention_config, backend=AttentionBackendEnum[draft]))
    assert compile_options(built) == had
    assert said == lines
    compiler.configure_post_pass()
    assert (had["slot"] in compiler.pass_manager.passes) is (target == "ROCM_AITER_MLA")


@pytest.mark.mutation("I5")
@pytest.mark.parametrize(
    ("target", "draft", "seen"),
    [("ROCM_AITER_MLA", "TRITON_MLA", "attention_backend"), ("TRITON_MLA", "ROCM_AITER_MLA", "'slot'")],
)
def test_mutation_a_gate_that_decides_again_for_a_draft_is_caught(config, said, monkeypatch, target, draft, seen):
    monkeypatch.setattr(compat_config, "is_decided", lambda vllm_config: False)
    with pytest.raises(AssertionError, match=seen):
        test_a_draft_with_another_attention_changes_nothing_once_the_target_is_built(
            config, said, monkeypatch, ON, target, draft
        )


# Options that are off, and options under another name.


@pytest.mark.parametrize(
    "own_entry",
    [{"enabled": False}, {"enabled": False, "kernel": "triton"}, {"strict": True}, {"kernel": "triton"}, {}],
    ids=str,
)
def test_own_entry_without_the_flag_shares_vllms_cache_key(config, own_entry):
    """Whatever is left behind after a roll-back: ``{"strict": true}`` once made vLLM compile again."""
    off, options = config(), {"aiter_mla": own_entry}
    built = config(additional_config=options)
    assert built.compute_hash() == off.compute_hash()
    assert "aiter_mla" in options, "the user's own mapping stays"
    other = {"another": 1}
    assert config(additional_config=options | other).compute_hash() == config(additional_config=other).compute_hash()


def test_own_entry_in_pass_config_without_the_flag_shares_vllms_cache_key(config):
    limited = config(compilation_config={"pass_config": {LIMIT_FIELD: 64}})
    assert limited.compute_hash() == config().compute_hash()


@pytest.mark.mutation("I5")
@pytest.mark.parametrize("own_entry", [{"enabled": False}, {"strict": True}], ids=str)
def test_mutation_own_entry_that_stays_is_caught(config, monkeypatch, own_entry):
    monkeypatch.setattr(compat_config, "drop_options", lambda vllm_config: None)
    with pytest.raises(AssertionError, match=r"^assert '\w+' == '\w+'"):
        test_own_entry_without_the_flag_shares_vllms_cache_key(config, own_entry)


@pytest.mark.mutation("I5")
def test_mutation_own_entry_that_leaves_only_where_it_says_false_is_caught(config, monkeypatch):
    """As it once was."""
    drop = compat_config.drop_options

    def drop_false(vllm_config):
        if vllm_config.additional_config.get("aiter_mla", {}).get("enabled") is False:
            drop(vllm_config)

    monkeypatch.setattr(compat_config, "drop_options", drop_false)
    with pytest.raises(AssertionError, match=r"^assert '\w+' == '\w+'"):
        test_own_entry_without_the_flag_shares_vllms_cache_key(config, {"strict": True})


@pytest.mark.parametrize("value", [ON["aiter_mla"], True])
@pytest.mark.parametrize("key", ["aiter-mla", "AITER_MLA", "vllm_aiter_mla", FLAG_FIELD])
def test_near_miss_is_a_warning_and_changes_nothing(config, said, key, value):
    built = config(additional_config={key: value})
    (line,) = said.at(logging.WARNING)
    assert f"additional_config.{key} " in line
    assert "additional_config.aiter_mla" in line
    assert pass_of(built) is None
    assert not set(ATTENTION_OPS) & set(built.compilation_config.splitting_ops)


def test_near_miss_next_to_the_real_name_is_told_too(config, said):
    assert pass_of(config(additional_config=ON | {"aiter-mla": {"strict": True}})) is not None
    assert len([line for line in said.at(logging.WARNING) if "additional_config.aiter-mla " in line]) == 1


@pytest.mark.mutation
def test_mutation_near_miss_that_is_not_told_is_caught(config, said, monkeypatch):
    monkeypatch.setattr(gate, "near_misses", lambda additional_config, is_enabled: ())
    with pytest.raises(ValueError, match="not enough values"):
        test_near_miss_is_a_warning_and_changes_nothing(config, said, "aiter-mla", True)
