"""Claims about the command as a whole: it runs anywhere, imports no AITER, and says the same to a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_aiter_mla.commands.doctor import command

RUN = "from vllm_aiter_mla.commands.doctor.command import main; import sys; sys.exit(main(as_json=True))"
# A machine without torch and vLLM: neither can be found.
BARE = (
    "import sys\n"
    "class Nothing:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.partition('.')[0] in ('torch', 'vllm'):\n"
    "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, Nothing())\n"
)


def doctor(code: str, *path: Path) -> tuple[int, dict[str, dict[str, str]]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record["exit"] == done.returncode
    return done.returncode, {check["name"]: check for check in record["checks"]}


def simulated_aiter(folder: Path, marker: Path) -> None:
    """An AITER that leaves a trace when it is imported, as the real one may start a compiler."""
    from vllm_aiter_mla.kernels.aiter.op import OP, REQUIRED

    (folder / "aiter" / "ops").mkdir(parents=True)
    for package in (folder / "aiter", folder / "aiter" / "ops"):
        (package / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (folder / "aiter" / "ops" / "cache.py").write_text(f"def {OP}({', '.join(REQUIRED)}): ...\n")


def test_doctor_runs_without_torch_and_vllm() -> None:
    status, checks = doctor(BARE + RUN)
    assert status == 1
    assert checks["torch"]["status"] == checks["vllm"]["status"] == "problem"
    assert checks["surface"]["status"] == checks["patches"]["status"] == "unknown"
    assert not [check for check in checks.values() if "the check failed" in check["detail"]]


def test_doctor_on_this_machine_never_imports_aiter(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    simulated_aiter(tmp_path, marker)
    # Whatever a release of vLLM's may try while it is looked at.
    eager = "from vllm_aiter_mla.commands.doctor import installed, command\n"
    eager += "def importing(given):\n    import aiter.ops.cache\n"
    eager += "command.CHECKS = (*command.CHECKS, ('eager', importing))\n"
    _, checks = doctor(eager + RUN, tmp_path)
    assert not marker.exists()
    assert "doctor does not import aiter" in checks["eager"]["detail"]
    assert checks["aiter"]["status"] == "warning"
    assert "15 arguments" in checks["aiter"]["detail"]
    # Real vLLM, as installed here.
    for name in ("vllm", "plugin", "surface", "mla-ops", "patches"):
        assert checks[name]["status"] == "ok", checks[name]


def test_without_vllm_the_plugins_own_options_are_still_checked() -> None:
    passes = "{'pass_config': {'fuse_aiter_qk_rope_kvcache_mlal': True}}"
    mistyped = f"main(['--compilation-config', __import__('json').dumps({passes})], as_json=True)"
    status, checks = doctor(BARE + RUN.replace("main(as_json=True)", mistyped))
    assert (status, checks["settings"]["status"]) == (1, "problem")
    assert "did you mean 'fuse_aiter_qk_rope_kvcache_mla'?" in checks["settings"]["detail"]
    others = "main(['-tp', '8', '-cc.mode=3', '--additional_config', '{}'], as_json=True)"
    status, checks = doctor(BARE + RUN.replace("main(as_json=True)", others))
    assert checks["settings"]["status"] == checks["graph"]["status"] == checks["user-pass"]["status"] == "unknown"
    assert "read by vLLM's own parser" in checks["settings"]["detail"]
    assert checks["settings"]["detail"].endswith("not read: -tp 8")


def test_the_guard_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_aiter_mla.commands.doctor.guard import aiter_not_importable

    simulated_aiter(tmp_path, tmp_path / "imported")
    monkeypatch.syspath_prepend(str(tmp_path))
    with aiter_not_importable(), pytest.raises(ImportError, match="compiler"):
        import aiter
    try:
        import aiter

        assert aiter.__file__
        assert (tmp_path / "imported").exists()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]


def test_one_line_per_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_aiter_mla.commands.doctor import conflicts, machine

    monkeypatch.setattr(command, "CHECKS", (("python", machine.python), ("dead-flag", conflicts.dead_flag)))
    config = json.dumps({"pass_config": {"fuse_rope_kvcache_cat_mla": True}})
    assert command.main(["--compilation-config", config]) == 1
    first, second, summary = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("ok       python")
    assert second.startswith("problem  dead-flag")
    assert "-> set use_inductor_graph_partition=true" in second
    assert summary.endswith("1 ok, 0 warning, 1 problem, 0 unknown")


def test_names_of_checks_are_unique() -> None:
    names = [name for name, _ in command.CHECKS]
    assert len(set(names)) == len(names)
