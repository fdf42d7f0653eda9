"""vLLM's slot for a custom post-grad pass: what stands in it, whether it can be chained, and putting ours there."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.admission import Skip


def slot() -> str:
    """Key in ``inductor_compile_config``; ``post_grad_custom_post_pass`` on every platform but out-of-tree ones."""
    from vllm.platforms import current_platform

    return str(getattr(current_platform, "pass_key", "post_grad_custom_post_pass"))


def current(compilation: Any) -> Any:
    """The object in the slot, ``None`` when it is free; also on a vLLM without slots, which the gate refuses later."""
    return getattr(compilation, "inductor_compile_config", {}).get(slot())


def install(compilation: Any, pass_: Any) -> None:
    """Put ``pass_`` (an ``InductorPass``) into the slot, in a new dict: another config may hold the old one."""
    compilation.inductor_compile_config = {**compilation.inductor_compile_config, slot(): pass_}


def why_not_chainable(compilation: Any) -> Skip | None:
    """A reason when what stands in the slot can neither run nor be identified in a cache key."""
    try:
        wrapped(compilation)
    except (TypeError, OSError) as error:
        where = f"compilation_config.inductor_compile_config[{slot()!r}]"
        return Skip("user_pass", f"{where} is {type(current(compilation)).__name__}: {error}")
    return None


def wrapped(compilation: Any) -> Any:
    """The user's pass as an ``InductorPass``, ``None`` when there is none.

    vLLM wraps a callable given as ``inductor_passes`` itself. With one put straight into ``inductor_compile_config`` it
    would fail while compiling, so that one is wrapped here in the same way.

    Raises:
        TypeError: not callable, or of a kind whose source cannot be found.
        OSError: its source cannot be read, so it has no identity for the compile cache.
    """
    from vllm.compilation.passes.inductor_pass import CallableInductorPass, InductorPass

    pass_ = current(compilation)
    if pass_ is None or isinstance(pass_, InductorPass):
        return pass_
    if not callable(pass_):
        raise TypeError("a custom pass must be callable")
    return CallableInductorPass(pass_)
