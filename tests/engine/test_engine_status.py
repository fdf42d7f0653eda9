"""What operators see of two engines of one process: each has its own status and line."""

import json
import subprocess
import sys

import pytest

from tests.sandbox import engine
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions, save

pytestmark = pytest.mark.engine


@pytest.mark.wide
def test_i15_two_engines_in_one_process_the_second_engages_after_a_failed_check_of_the_first(tmp_path):
    spec = EngineSpec(
        vllm=VllmOptions(model={"num_hidden_layers": 2, "yarn": False}, extra={"enforce_eager": True}),
        plugin=PluginOptions(kernel="aiter"),
        emulation=Emulation(arch="gfx942"),
    )
    save(spec, tmp_path / "spec")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.two_engines_child", str(tmp_path / "spec"), str(tmp_path)],
        env=engine.environment_for(spec, tmp_path / "cache", tmp_path / "inductor"), capture_output=True, text=True,
        timeout=engine.TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = json.loads((tmp_path / "status.json").read_text())
    assert (first["engaged"], set(first["skipped"].values())) == ({}, {"kernel_shape"})
    assert (len(second["engaged"]), second["skipped"]) == (2, {})
    lines = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "aiter-mla: " in line]
    assert len([line for line in lines if "0/2: kernel_shape" in line]) == 1
    assert len([line for line in lines if "2/2 MLA layers engaged" in line]) == 1
