"""A model as ``plan`` sees it: where its config is, and what vLLM says of it."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.compat import offline_model
from vllm_aiter_mla.compat.dry_model import MlaLayer
from vllm_aiter_mla.compat.offline_model import Answers

EXAMPLES = Path(__file__).parent / "models"


class ModelNotFoundError(LookupError):
    """No config for the name that was given; the message says what can be given instead."""


@dataclass(frozen=True)
class Source:
    """A config that was found.

    Attributes:
        name: as the user gave it.
        origin: where the config is, in words.
        file: the config's file; None for a bundled example.
        config: a bundled example's config.
        basis: for a bundled example, what its fields rest on; else empty.
        assumed: for a bundled example, what is assumed in it.
    """

    name: str
    origin: str
    file: Path | None = None
    config: dict[str, Any] | None = None
    basis: str = ""
    assumed: tuple[str, ...] = ()

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder in which the config is ``config.json``, with what lies beside it.

        Raises:
            ValueError: the file is not a JSON object.
        """
        config = self.config if self.file is None else _read(self.file)
        if self.file is not None and self.file.name == "config.json":
            yield self.file.parent
            return
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield Path(made)


@dataclass(frozen=True)
class Kind:
    """MLA layers that are alike, draft layers among them: one of them, without its name, and how many."""

    layer: MlaLayer
    count: int


@dataclass(frozen=True)
class ModelFacts:
    """What is planned with: the config's source, and vLLM's answers about it with the user's options."""

    source: Source
    vllm: Answers

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The MLA layers by what they are, the most frequent first."""
        found = Counter(replace(layer, name="") for layer in (*self.vllm.mla_layers, *self.vllm.draft_layers))
        return tuple(Kind(layer, count) for layer, count in found.most_common())

    @property
    def fp8_cache(self) -> bool:
        """Whether cache and prepared query are fp8."""
        return self.vllm.cache_dtype.startswith("fp8")

    def as_record(self) -> dict[str, Any]:
        """Plain containers; the layers are counted, not listed."""
        answers = asdict(self.vllm) | {"mla_layers": len(self.vllm.mla_layers)}
        answers |= {"draft_layers": len(self.vllm.draft_layers)}
        kinds = [{"count": kind.count} | asdict(kind.layer) for kind in self.kinds]
        source = {"name": self.source.name, "source": self.source.origin, "basis": self.source.basis}
        return source | {"assumed": self.source.assumed} | answers | {"kinds": kinds}


def examples() -> dict[str, dict[str, Any]]:
    """The bundled examples by name, each with ``example`` (what it rests on) and ``config``."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES.glob("*.json")}
    return dict(sorted(found.items()))


def find(name: str) -> Source:
    """The config of ``name``: a folder or file, a bundled example, or a hub name in the local cache.

    Raises:
        ModelNotFoundError: none of them; nothing is downloaded.
    """
    local = _local_file(name)
    if local is not None:
        return Source(name, f"file {local}", local)
    bundled = examples()
    if name.lower() in bundled:
        return _from_example(name, bundled[name.lower()])
    cached = _cached(name)
    if cached is not None:
        return Source(name, "local Hugging Face cache", cached)
    for entry in bundled.values():
        if entry["example"]["hub_name"].lower() == name.lower():
            return _from_example(name, entry)
    raise ModelNotFoundError(
        f"{name}: no such folder or file, no bundled example of that name, and not in the local Hugging Face cache; "
        f"plan downloads nothing. Give the path of a config.json, or one of: {', '.join(bundled)}"
    )


def facts(source: Source, options: ServeOptions) -> ModelFacts:
    """Ask vLLM about the model with the options.

    Raises:
        ValueError: the file is not a config, or vLLM does not take it with these options.
        NotKnownError: vLLM cannot be asked about it here.
    """
    batch = (options.max_num_seqs, options.max_num_batched_tokens)
    with source.folder() as folder:
        return ModelFacts(source, offline_model.ask(options.parsed, folder, options.arch, batch))


def _from_example(name: str, entry: dict[str, Any]) -> Source:
    about = entry["example"]
    return Source(
        name, "bundled example", config=entry["config"], basis=about["basis"], assumed=tuple(about["assumed"])
    )


def _local_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        found = next((candidate for candidate in (path / "config.json", path) if candidate.is_file()), None)
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return None
    if found is not None:
        return found
    if is_folder:
        raise ModelNotFoundError(f"{name} is a folder without a config.json")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable config: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a readable config: a JSON object expected")
    return config


def _cached(name: str) -> Path | None:
    """The config of a hub name that an earlier download left in the local cache."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except Exception:  # absent, or the name is not a repository name
        return None
    return Path(found) if isinstance(found, str) else None
