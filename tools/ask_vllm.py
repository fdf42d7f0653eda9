"""Print as JSON what the plugin would skip for in this environment's vLLM, in the order of its rules.

``tools/releases.py`` runs it in two environments and compares the sources of the forwards.
"""

import inspect
import json
from collections.abc import Callable, Sequence


def release() -> list[str]:
    """Return the release if it is outside the window."""
    from vllm_aiter_mla.compat import release

    version = release.vllm_version()
    return [] if release.in_window(version) else [version]


def names() -> list[str]:
    """Return the names that the gate or serving needs and this vLLM lacks."""
    from vllm_aiter_mla.compat import layer, release

    return [*release.missing_capabilities(), *layer.missing_names()]


def ops() -> list[str]:
    """Return how the arguments of vLLM's MLA ops differ."""
    from vllm_aiter_mla.compat import release

    return [*release.op_differences(fused=False), *release.op_differences(fused=True)]


def forwards() -> list[str]:
    """Return class and digest of each forward that the module integration does not know."""
    from vllm_aiter_mla.compat import wrapper

    digests = {cls: wrapper.digest(cls.forward) for cls in wrapper.KNOWN_FORWARDS}
    return [f"{cls.__name__} {found}" for cls, found in digests.items() if found not in wrapper.KNOWN_FORWARDS[cls]]


def sources() -> dict[str, str]:
    """Return the source of each forward that the module integration replaces, by class."""
    from vllm_aiter_mla.compat import wrapper

    return {cls.__name__: inspect.getsource(cls.forward) for cls in wrapper.KNOWN_FORWARDS}


QUESTIONS: dict[str, Callable[[], Sequence[str]]] = {
    "vllm_version": release, "capability": names, "op_schema": ops, "unknown_forward": forwards,
}  # fmt: skip


def answered(ask: Callable[[], Sequence[str]]) -> list[str]:
    """Return the answer; an import that fails is one, as it names what has moved."""
    try:
        return list(ask())
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def main() -> None:
    """Print one line of JSON, the last of the output: {"found": {code: lines}, "sources": {class: text}}."""
    found = {code: answered(ask) for code, ask in QUESTIONS.items()}
    texts = sources() if not any("Error" in line for line in found["unknown_forward"]) else {}
    print(json.dumps({"found": found, "sources": texts}))


if __name__ == "__main__":
    main()
