"""Claims about the small model's tokenizer and what vLLM's stream needs of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.serving import small

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("text", ["5 + 8 = 13.\n#### 13", "héllo 世界 \x00\t", "", "<300>", "#" * 600])
def test_every_text_comes_back(folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == json.loads((folder / "config.json").read_text())["vocab_size"] == small.VOCABULARY


def test_no_greedy_token_is_half_a_character(folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    silent = {int(row) for row in (rows == 0).all(dim=1).nonzero().flatten()}
    assert silent == {number for number in range(small.VOCABULARY) if tokenizer.decode([number]) == "�"}
    assert len(silent) == 128
