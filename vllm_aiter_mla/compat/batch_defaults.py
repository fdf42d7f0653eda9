"""The scheduler's defaults of ``vllm serve`` on a card that is not here.

What: vLLM's rule of ``EngineArgs``, with its bounds, runs while its module sees a stand-in for the platform.
Why: it is the installed release's rule, it goes by the card's memory, and the card is not in this machine.
Link: ``vllm/engine/arg_utils.py`` (0.30 to 0.33).
Probe: the stand-in notes what it is asked and cannot answer; vLLM would take that for a small card.
Remove when: vLLM offers the rule as a function of the card.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any


class BatchDefaultsError(RuntimeError):
    """The installed vLLM asks for more than is known of a card that is not here."""


class _Card:
    """vLLM's platform as far as the rule asks it."""

    def __init__(self, name: str, memory: int) -> None:
        self._name, self._memory = name, memory
        self.unknown: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.unknown.append(name)
        raise AttributeError(name)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes."""
        return self._memory

    def get_device_name(self, device_id: int = 0) -> str:
        """As the driver spells it."""
        return self._name

    def is_device_capability(self, capability: object, device_id: int = 0) -> bool:
        """Asked since vLLM 0.33, for a card with much memory and little compute that is none of those planned for."""
        return False

    def is_tpu(self) -> bool:
        """Never."""
        return False

    def is_cpu(self) -> bool:
        """Never."""
        return False


def batch_defaults(name: str, memory: int, parsed: Any) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens of an API server, where not given those that vLLM puts in their place.

    Args:
        name: of the card.
        memory: of the card, in bytes.
        parsed: vLLM's own namespace of the options of ``vllm serve``.

    Raises:
        BatchDefaultsError: the rule of this vLLM asks what is not known here.
    """
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    card, options = _Card(name, memory), _options(parsed, arg_utils.EngineArgs.get_batch_defaults)
    model = SimpleNamespace(max_model_len=options.max_model_len, is_multimodal_model=False, is_mm_prefix_lm=False)
    platform = vars(arg_utils)["current_platform"]
    vars(arg_utils)["current_platform"] = card
    try:
        rule: Any = arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args
        rule(options, UsageContext.OPENAI_API_SERVER, model, _parallel(parsed))
    # Whatever a changed rule raises.
    except Exception as error:
        raise BatchDefaultsError(f"{type(error).__name__}: {error}") from error
    finally:
        vars(arg_utils)["current_platform"] = platform
    if card.unknown:
        raise BatchDefaultsError(f"it asks for {', '.join(card.unknown)}")
    return options.max_num_seqs, options.max_num_batched_tokens


def _options(parsed: Any, defaults: Any) -> Any:
    """The namespace in the place of vLLM's ``EngineArgs``. Only a prefill in one piece needs the model's length.

    Raises:
        BatchDefaultsError: such a prefill, without that length.
    """
    options = copy.copy(parsed)
    options.get_batch_defaults = defaults
    if options.enable_chunked_prefill is None:
        options.enable_chunked_prefill = True
    length = options.max_model_len
    if not isinstance(length, int) or length < 1:
        if not options.enable_chunked_prefill and options.max_num_batched_tokens is None:
            raise BatchDefaultsError("without chunked prefill vLLM goes by --max-model-len, which is not given")
        options.max_model_len = sys.maxsize
    return options


def _parallel(parsed: Any) -> Any:
    from vllm.config import ParallelConfig

    rule: Any = ParallelConfig.use_batched_dp_moe
    return SimpleNamespace(use_batched_dp_moe=rule.fget(parsed))
