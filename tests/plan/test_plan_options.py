"""Options of ``vllm serve`` given to plan: every spelling is read."""

import json

import pytest

from vllm_aiter_mla import plugin as our_plugin
from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.commands.plan import answer
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.settings import FLAG_FIELD, Settings

our_plugin.register()


def read(arguments):
    return compat_config.settings_of(offline.serve_options(arguments))


def compiled(**config):
    return ["--compilation-config", json.dumps(config)]


def plugin(**config):
    return ["--additional-config", json.dumps(config)]


def test_every_pass_option_of_the_installed_vllm_is_known():
    from vllm.config import PassConfig

    names = [name for name in PassConfig.__dataclass_fields__ if name.startswith("fuse_")]
    assert len(names) > 3
    read(compiled(pass_config=dict.fromkeys(names, False)))


@pytest.mark.parametrize(
    "arguments",
    [
        [f"-cc.pass_config.{FLAG_FIELD}=true"],
        [f"-cc.pass_config.{FLAG_FIELD}", "true"],
        [f"--compilation_config.pass_config.{FLAG_FIELD}=true"],
        ["-cc.mode=3", "-cc.splitting_ops+=a,b", f"-cc.pass_config.{FLAG_FIELD}=true"],
        compiled(pass_config={FLAG_FIELD: True}),
        ["--additional_config.aiter_mla.enabled", "true"],
        plugin(aiter_mla={"enabled": True}),
    ],
)
def test_every_spelling_of_vllm_serve_switches_the_fast_path_on(arguments):
    more = ["--additional-config.aiter_mla.kernel", "triton"] if "--additional-config" not in arguments else []
    assert read([*arguments, *more]) == Settings(enabled=True, kernel="triton" if more else "auto")


def test_a_key_that_is_almost_the_plugins_own_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    _, given = answer.engine_args(tmp_path, plugin(**{"aiter-mla": {"enabled": True}, "another": {}}))
    notes = " ".join(given.notes)
    assert [f"additional_config.{key} " in notes for key in ("aiter-mla", "another")] == [True, False]
