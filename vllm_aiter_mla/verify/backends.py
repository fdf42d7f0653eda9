"""Which back ends can be verified on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_aiter_mla.backends import AITER_KERNELS, Backends
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.verify.cases import Item
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.runner import Result, run_case

Found = KernelBackend | str
"""A new back end, or why there is none."""


def find(name: str) -> Found:
    """Look for the back end ``name``. If that raises, the back end is missing, with the error as the reason."""
    try:
        return FINDERS[name]()
    except Exception as error:  # importing a vendor's package may do anything
        return f"{type(error).__name__}: {error}"


def load(name: str) -> KernelBackend:
    """Return a new back end that ``find`` has found before. Raises RuntimeError if it is gone."""
    found = find(name)
    if isinstance(found, str):
        raise RuntimeError(f"{name}: {found}")
    return found


def _built(name: str) -> Found:
    return Backends(Settings(), detect_platform()).get(name)


FINDERS: dict[str, Callable[[], Found]] = {
    name: partial(_built, name) for name in ("reference", "triton", *AITER_KERNELS)
}
"""How to look for each back end, in the order in which they run; add your own."""


def run(item: Item, engine: EagerEngine) -> Result:
    """Run an item with a new back end, because state kept by one case could change the next."""
    return run_case(item, load(item.backend), engine)
