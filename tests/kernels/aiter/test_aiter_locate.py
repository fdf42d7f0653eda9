"""Finding AITER without importing it: every way of not being usable has a sentence of its own."""

import re
import sys
from types import SimpleNamespace

import pytest

from tests.sandbox.simulated_aiter import install, write_tree
from tests.support.simulated_aiter import ROCM
from vllm_aiter_mla.kernels.aiter import op as aiter_op
from vllm_aiter_mla.kernels.aiter.op import OP, REQUIRED, load_op, locate_aiter, schema_problem, signature_problem
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import aiter_factory
from vllm_aiter_mla.settings import Settings

SENTENCES = {
    "0.1.19": "has no `compute_all_q_rope`",
    "0.1.7": f"this AITER has no {OP}: it appeared in 0.1.8",
    "0.1.20+future": "has arguments this version of the plugin does not know",
    "broken": "cache.py is missing: a broken or very old AITER install",
    "namespace": "`aiter` is a namespace without __init__.py",
    "pypi": "is not AMD's AITER but a package of the same name",
}


@pytest.mark.parametrize(("version", "sentence"), list(SENTENCES.items()))
def test_each_unusable_aiter_has_its_own_sentence(version, sentence):
    with install("gfx942", version):
        assert sentence in str(locate_aiter().reason)
        with pytest.raises(aiter_op.AiterUnavailableError, match=re.escape(sentence)):
            load_op()
        assert "aiter" not in sys.modules


def test_a_good_aiter_is_described_without_being_imported():
    with install("gfx942") as root:
        found = locate_aiter()
        assert (found.reason, found.package, found.distribution) == (None, root / "aiter", "amd-aiter 0.1.20")
        assert (found.signature, found.prebuilt) == (REQUIRED, True)
        assert not {name for name in sys.modules if name.split(".")[0] == "aiter"}


def test_an_absent_aiter_a_module_without_a_spec_and_a_distribution_without_its_package(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "aiter", SimpleNamespace(__spec__=None))
        assert "aiter.__spec__" in str(locate_aiter().reason)
        assert "not installed" not in str(locate_aiter().reason)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "install amd-aiter 0.1.19.post1 or newer (PyPI's `aiter` is another project)" in str(locate_aiter().reason)
    monkeypatch.syspath_prepend(write_tree(tmp_path))
    assert "amd-aiter 0.1.20 is installed but its package `aiter` is not importable" in str(locate_aiter().reason)


def test_an_install_without_a_built_module_is_told_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_tree(tmp_path, prebuilt=False))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AITER_JIT_DIR", raising=False)
    found = locate_aiter()
    assert (found.reason, found.prebuilt) == (None, False)
    (tmp_path / "module_cache.so").touch()
    monkeypatch.setenv("AITER_JIT_DIR", str(tmp_path))
    assert locate_aiter().prebuilt


@pytest.mark.parametrize("damage", ["def broken(:\n", "\0", "\udcff"])
def test_unreadable_source_is_a_reason_and_no_exception(tmp_path, monkeypatch, damage):
    root = write_tree(tmp_path)
    (root / "aiter" / "ops" / "cache.py").write_bytes(damage.encode(errors="surrogateescape"))
    monkeypatch.syspath_prepend(root)
    assert "cannot be read" in str(locate_aiter().reason)


def test_further_arguments_with_defaults_are_let_through():
    assert signature_problem((*REQUIRED, "one_more"), mandatory=14) is None
    assert signature_problem((*REQUIRED, "one_more"), mandatory=16) is not None
    assert signature_problem(("q", *REQUIRED[1:]), mandatory=14) is not None


def test_the_schema_is_checked_after_the_import():
    with install("gfx942"):
        op = load_op()
    assert schema_problem(op) is None
    arguments = list(op._schema.arguments)
    assert tuple(argument.name for argument in arguments) == REQUIRED
    old = SimpleNamespace(_schema=SimpleNamespace(arguments=arguments[:-1]))
    assert "the loaded op differs from its source" in str(schema_problem(old))
    arguments[6] = SimpleNamespace(name="slot_mapping", type="int", has_default_value=lambda: False)
    other = SimpleNamespace(_schema=SimpleNamespace(arguments=arguments))
    assert schema_problem(other) == "the loaded op takes other types for: slot_mapping"


def test_a_failing_import_is_a_reason(tmp_path, monkeypatch):
    root = write_tree(tmp_path)
    (root / "aiter" / "__init__.py").write_text("raise RuntimeError('Get GPU arch from rocminfo failed')\n")
    monkeypatch.syspath_prepend(root)
    reason = aiter_factory(Platform("gfx942", ROCM), Settings())
    assert reason == "`import aiter` failed: RuntimeError: Get GPU arch from rocminfo failed"
    sys.modules.pop("aiter", None)


def test_aiter_is_not_even_probed_off_amd_cards():
    assert "this card is sm90" in str(aiter_factory(Platform("sm90"), Settings()))
