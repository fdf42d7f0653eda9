#!/usr/bin/env bash
# transformers 5.19.0 with torch 2.13.0: `from transformers import AutoTokenizer` imports torch's compiler, whose settings
# are read from the environment then. A TORCHINDUCTOR_ variable that a program sets later, before anything is compiled, is
# dropped without a word. `from transformers import AutoConfig` does not do that, so the order of two imports decides.
# Seen with TORCHINDUCTOR_FX_GRAPH_CACHE=0, which a test sets so that a changed compiler pass is not answered from a cache,
# and with TORCHINDUCTOR_MAX_AUTOTUNE=1.
#
# A guess: text is split into tokens without a compiler, and its variables count until something is compiled.
#
# Seen: whether torch._inductor.config is imported, and what it says of the two variables.
# pip's default index may serve a CUDA build of torch of several GB: PIP_EXTRA_INDEX_URL names another one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 3
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0 numpy==2.3.5 setuptools==81.0.0 || exit 3
cat >"$work/settings.py" <<'PY'
import os
import sys

import torch

if sys.argv[1] == "AutoConfig":
    from transformers import AutoConfig
if sys.argv[1] == "AutoTokenizer":
    from transformers import AutoTokenizer
imported = "torch._inductor.config" in sys.modules
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
from torch._inductor import config  # as torch.compile does in its first call

print(f"{sys.argv[1]}: imported {imported}, cache {config.fx_graph_cache}, autotune {config.max_autotune}")
PY
unset TORCHINDUCTOR_FX_GRAPH_CACHE TORCHINDUCTOR_MAX_AUTOTUNE
seen=$(for name in nothing AutoConfig AutoTokenizer; do "$work/venv/bin/python" "$work/settings.py" "$name" 2>/dev/null; done)
echo "$seen"
[ "$seen" = "nothing: imported False, cache False, autotune True
AutoConfig: imported False, cache False, autotune True
AutoTokenizer: imported True, cache True, autotune False" ]
