# SPDX-License-Identifier: Apache-2.0
"""Options of ``vllm serve`` by their names, read from vLLM's sources: a misspelt one ends a command at once.

vLLM's own parser has the last word. Importing it takes ten seconds.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
OPPOSITES = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"))
"""How vLLM's parser turns a switch round; the last two from 0.33 on."""
SIMILAR = 0.75
"""Of two names, as difflib counts it: an option that is like no other is left to vLLM's parser."""


def check(words: Sequence[str], own: Iterable[str] = ()) -> None:
    """Check the names of the options among the words after MODEL, up to "--"; ``own`` are the command's own options.

    Raises:
        ValueError: an option is neither vLLM's nor the command's and looks like one that is; names both.
    """
    asked = [word for word in (words[: words.index("--")] if "--" in words else words) if word.startswith("--")]
    if not asked:
        return
    known = {*names(), *own}
    for word in asked:
        given = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if not re.match(r"--[a-z]", given) or any(name.startswith(given) for name in known):
            continue
        if any(given.startswith(one) and other + given.removeprefix(one) in known for one, other in OPPOSITES):
            continue
        if similar := get_close_matches(given, sorted(known), 1, SIMILAR):
            raise ValueError(f"{word.partition('=')[0]}: no such option; did you mean {similar[0]}?")


@cache
def names() -> frozenset[str]:
    """Return more names than vLLM has: each literal that begins with a dash, and each field of a class, as an option.

    None where vLLM is not installed.
    """
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    root, names = Path(found.origin).parent, set[str]()
    for path in (path for pattern in SOURCES for path in root.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", text))
        names.update("--" + field.replace("_", "-") for field in re.findall(r"^    ([a-z]\w*):", text, re.MULTILINE))
    return frozenset(names)
