# SPDX-License-Identifier: Apache-2.0
"""Find a model's config, and read what the command line says about its deployment."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm_aiter_mla.commands.compat.offline import USE_AITER, VARIABLES

EXAMPLES = Path(__file__).parent / "models"
CONFIGS = ("config.json", "params.json")
"""Names of a model's config: the second is Mistral's."""
Variables = Mapping[str, tuple[str, str]]
"""Value and origin ("--env", "environment" or "default") of each environment variable that is set for the plan."""


@dataclass(frozen=True)
class Source:
    """A config that was found."""

    name: str  # as the user gave it
    source: str  # where the config is, in words
    config: Path | dict[str, Any]  # the config's file, or a bundled example's config
    basis: str = ""  # for a bundled example, what its fields rest on; else empty
    assumed: tuple[str, ...] = ()  # for a bundled example, what is assumed in it

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
        """Give a folder with the config as ``config.json`` or Mistral's ``params.json``, and the files around it.

        Raises:
            ValueError: the file is not a JSON object.
        """
        config = self._read()
        if isinstance(self.config, Path) and self.config.name in CONFIGS:
            yield self.config.parent
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield Path(folder)


def examples() -> dict[str, dict[str, Any]]:
    """Return the bundled examples by name, each with ``example`` (what it rests on) and ``config``.

    A config, or a part of one, that names a ``base`` takes its other fields from the example of that name.
    """
    entries = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(EXAMPLES.glob("*.json"))}

    def whole(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        own = {name: whole(value) for name, value in part.items() if name != "base"}
        return {**whole(entries[part["base"]]["config"]), **own} if "base" in part else own

    return {name: entry | {"config": whole(entry["config"])} for name, entry in entries.items()}


def find(name: str) -> Source:
    """Return the config of ``name``: a folder or file, a bundled example, or a hub name in the local cache.

    Raises:
        LookupError: it is none of these; nothing is downloaded.
    """
    local = _local_file(name)
    if local is not None:
        return Source(name, f"file {local}", local)
    bundled = examples()
    if name.lower() in bundled:
        return _from_example(name, bundled[name.lower()])
    try:
        return Source(name, "local Hugging Face cache", cached_config(name))
    except LookupError as error:
        why_not_cached = str(error)
    for entry in bundled.values():
        if entry["example"]["hub_name"].lower() == name.lower():
            return _from_example(name, entry)
    tail = name.rpartition("/")[2].lower()
    # A release in between has the sizes of the one that its name begins with: DeepSeek-V3.1 those of deepseek-v3.
    begins = sorted((known for known in bundled if tail.startswith(known)), key=len)
    similar = begins[-1:] or get_close_matches(tail, bundled, 1)
    meant = f"Did you mean {similar[0]}?" if similar else f"Or one of: {', '.join(bundled)}"
    raise LookupError(
        f"{name}: no such folder or file, no bundled example of that name, and {why_not_cached}; "
        f"nothing is downloaded. Give the path of a config.json. {meant}"
    )


def _from_example(name: str, entry: dict[str, Any]) -> Source:
    about = entry["example"]
    return Source(name, "bundled example", entry["config"], about["basis"], tuple(about["assumed"]))


def _local_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        candidates = (*(path / config for config in CONFIGS), path)
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return None
    if file is None and is_folder:
        raise LookupError(f"{name} is a folder without a {' or a '.join(CONFIGS)}")
    return file


def cached_config(name: str, revision: str | None = None) -> Path:
    """Return the config of a hub name in the local Hugging Face cache.

    Raises:
        LookupError: the cache has none, or could not be searched; the message says which.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except Exception as error:
        problem = f"the local Hugging Face cache was not searched ({type(error).__name__}: {error})"
        raise LookupError(problem) from error
    try:
        cached = [try_to_load_from_cache(name, config, revision=revision) for config in CONFIGS]
        file = next((path for path in cached if isinstance(path, str)), None)
    except Exception:  # the name is not a repository name
        file = None
    if file is None:
        raise LookupError("not in the local Hugging Face cache")
    return Path(file)


def environment(entries: Sequence[str], environ: Mapping[str, str]) -> Variables:
    """Return the variables of the plan, from the ``entries`` of --env and this process's environment.

    VLLM_ROCM_USE_AITER is 1 where it is unset: nothing can engage without it. A variable of --env that no plan depends
    on is passed on to vLLM too.

    Raises:
        ValueError: an entry has no name or no ``=``.
    """
    variables = {USE_AITER: ("1", "default")} | {
        name: (environ[name], "environment") for name in VARIABLES if name in environ
    }
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise ValueError(f"--env {entry}: NAME=VALUE expected")
        variables[name] = (value, "--env")
    return variables


TP = ("-tp", "--tensor-parallel-size")


def deployments(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the sizes of tensor parallelism that are asked for, and the options of ``vllm serve`` for each.

    ``-tp 1,2,4,8`` asks for four; vLLM's own options ask for one, whose size is given as it is.
    """
    for index, word in reversed([*enumerate(arguments)]):  # of an option that is given twice vLLM takes the last
        option, equals, value = word.partition("=")
        if option.replace("_", "-") not in TP:
            continue
        rest = 1 if equals else 2
        value = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
        sizes = [size.strip() for size in value.split(",")]
        if len(sizes) > 1 and all(map(str.isdecimal, sizes)):  # otherwise vLLM says what is wrong
            return sizes, [(*arguments[:index], option, size, *arguments[index + rest :]) for size in sizes]
        break
    return [""], [tuple(arguments)]
