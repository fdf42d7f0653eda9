# SPDX-License-Identifier: Apache-2.0
"""Find a model's config: a file, a bundled example, or a hub name in the local cache."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent / "models"
CONFIG_NAMES = ("config.json", "params.json")
"""File names of a model's config. The second is Mistral's."""


@dataclass(frozen=True)
class ConfigSource:
    """A model's config and its origin."""

    name: str  # MODEL as typed
    config_location: str  # in words
    config: Path | dict[str, Any]  # the config's file, or a bundled example's config
    basis: str = ""  # where the fields of a bundled example come from; else empty
    assumed: tuple[str, ...] = ()  # assumptions of a bundled example

    def _read(self) -> dict[str, Any]:
        if not isinstance(self.config, Path):
            return self.config
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.config} is not a readable config: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{self.config} is not a readable config: a JSON object expected")
        return config

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a folder with ``config.json`` or Mistral's ``params.json``, and the files next to it.

        Raises:
            ValueError: the file is not a JSON object.
        """
        config = self._read()
        if isinstance(self.config, Path) and self.config.name in CONFIG_NAMES:
            yield self.config.parent
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield Path(folder)


def examples() -> dict[str, dict[str, Any]]:
    """Return the bundled examples by name. Each has ``config`` and ``example``, which describes where it comes from.

    If a config, or a part of one, names a ``base``, its other fields come from the example of that name.
    """
    entries = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(EXAMPLES.glob("*.json"))}

    def expand(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        fields = {name: expand(value) for name, value in part.items() if name != "base"}
        return {**expand(entries[part["base"]]["config"]), **fields} if "base" in part else fields

    return {name: entry | {"config": expand(entry["config"])} for name, entry in entries.items()}


def find_config(name: str, revision: str | None = None) -> ConfigSource:
    """Return the config of ``name``: a folder or file, a bundled example, or a hub name in the local cache.

    Nothing is downloaded. A ``revision`` concerns hub names only, as in vLLM.

    Raises:
        LookupError: ``name`` is none of these, or the cache lacks the revision.
    """
    local_file = _local_file(name)
    if local_file is not None:
        return ConfigSource(name, f"file {local_file}", local_file)
    bundled = examples()
    if name.lower() in bundled:
        return _from_example(name, bundled[name.lower()])
    try:
        return ConfigSource(name, "local Hugging Face cache", cached_config(name, revision))
    except LookupError as error:
        if revision is not None:  # an example has the sizes of no revision
            raise LookupError(f"{name} --revision {revision}: {error}; nothing is downloaded") from error
        cache_reason = str(error)
    for entry in bundled.values():
        if entry["example"]["hub_name"].lower() == name.lower():
            return _from_example(name, entry)
    base_name = name.rpartition("/")[2].lower()
    # A minor release has the sizes of the release that its name begins with: DeepSeek-V3.1 those of deepseek-v3.
    prefixes = sorted((example for example in bundled if base_name.startswith(example)), key=len)
    similar = prefixes[-1:] or get_close_matches(base_name, bundled, 1)
    hint = f"Did you mean {similar[0]}?" if similar else f"Or one of: {', '.join(bundled)}"
    raise LookupError(
        f"{name}: no such folder or file, no bundled example of that name, and {cache_reason}; "
        f"nothing is downloaded. Give the path of a config.json. {hint}"
    )


def _from_example(name: str, entry: dict[str, Any]) -> ConfigSource:
    example = entry["example"]
    return ConfigSource(name, "bundled example", entry["config"], example["basis"], tuple(example["assumed"]))


def _local_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        candidates = (*(path / config for config in CONFIG_NAMES), path)
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return None
    if file is None and is_folder:
        raise LookupError(f"{name} is a folder without a {' or a '.join(CONFIG_NAMES)}")
    return file


def cached_config(name: str, revision: str | None = None) -> Path:
    """Return the config of a hub name in the local Hugging Face cache.

    Raises:
        LookupError: the cache has none, or cannot be searched. The message says which.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except Exception as error:
        problem = f"the local Hugging Face cache was not searched ({type(error).__name__}: {error})"
        raise LookupError(problem) from error
    try:
        cached = [try_to_load_from_cache(name, config, revision=revision) for config in CONFIG_NAMES]
        file = next((path for path in cached if isinstance(path, str)), None)
    except Exception:  # the name is not a repository name
        file = None
    if file is None:
        raise LookupError("not in the local Hugging Face cache")
    return Path(file)
