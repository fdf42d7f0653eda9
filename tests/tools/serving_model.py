"""A small random model with a tokenizer that vLLM serves on a CPU, and questions for lm-eval without the hub."""

import json
from pathlib import Path

LAYERS, LENGTH, REQUESTS, VOCABULARY = 2, 1024, 16, 512
TASK = "gsm8k_local"
# With vLLM's rounding, so that both sides must answer the same.
OPTIONS = (
    *("--max-model-len", str(LENGTH), "--max-num-seqs", str(REQUESTS), "--max-num-batched-tokens", str(LENGTH)),
    *("--no-enable-prefix-caching", "--additional-config.aiter_mla.debug.rounding=two"),
)


def save(folder: Path) -> Path:
    """Write model and tokenizer into ``folder`` and return it.

    Without YaRN, which vLLM's eager mode rounds differently from any kernel.
    """
    from tests.sandbox.model import TinyDeepseek

    sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    TinyDeepseek(**sizes, yarn=False).save(folder)
    save_tokenizer(folder)
    _silence_half_characters(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges: one token a byte, so that every text comes back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{number}>" for number in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def _silence_half_characters(folder: Path) -> None:
    """Zero the output rows of bytes that are only part of a character, so that greedy decoding never picks them.

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


def save_task(folder: Path) -> Path:
    """Write lm-eval's GSM8K task over ``questions.jsonl``; prompt, filters and metric are the installed task's."""
    import lm_eval

    rows = (Path(__file__).parent / "questions.jsonl").read_text().splitlines()
    files = {"train": folder / "examples.jsonl", "test": folder / "questions.jsonl"}
    # An example that is also asked would give its answer away.
    for path, part in zip(files.values(), (rows[:5], rows[5:]), strict=True):
        path.write_text("\n".join(part))
    data = {"data_files": {split: str(path) for split, path in files.items()}}
    task = {"include": str(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"), "task": TASK}
    task |= {"tag": None, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": data}
    # JSON is YAML.
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))
    return folder
