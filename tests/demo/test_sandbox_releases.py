"""Claims about what vLLM 0.33 asks of the sandbox, held on the installed release: a later call must not break it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.sandbox import gpu_ops, platform
from tests.sandbox.aiter_attention import PageIndices


class Selector(NamedTuple):
    use_mla: bool
    kv_cache_dtype: str


def test_mla_may_have_an_fp8_cache_on_a_platform_that_refuses_it_and_other_attention_may_not() -> None:
    class Platform:
        @classmethod
        def get_attn_backend_cls(cls, selected_backend: str, config: Selector, num_heads: int | None = None) -> str:
            if config.kv_cache_dtype != "auto":
                raise ValueError("not supported on CPU")
            return f"{cls.__name__} {selected_backend} {num_heads}"

    platform.allow_fp8_mla(Platform)
    platform.allow_fp8_mla(Platform)
    found = Platform.get_attn_backend_cls("CPU_MLA", attn_selector_config=Selector(True, "fp8"), num_heads=4)
    assert found == "Platform CPU_MLA 4"
    with pytest.raises(ValueError, match="not supported"):
        Platform.get_attn_backend_cls("CPU_ATTN", Selector(False, "fp8"))


@pytest.mark.parametrize("real", [None, [3, 6]])
def test_indices_past_a_requests_real_length_repeat_its_first_page(real: list[int] | None) -> None:
    table = torch.tensor([[5, 2], [7, 1]], dtype=torch.int32)
    bounds = torch.tensor([0, 5, 11], dtype=torch.int32)
    found = torch.full((12,), -1, dtype=torch.int32)
    more = () if real is None else (torch.tensor(real, dtype=torch.int32),)
    tail = {} if real is None else {"CLAMP_TAIL": True}
    PageIndices()[(2, 1)](found, table, *table.stride(), bounds, *more, KERNEL_BLOCK_SIZE=4, BLOCK_SIZE=1024, **tail)
    first = [20, 21, 22, 23, 8] if real is None else [20, 21, 22, 20, 20]
    assert found.tolist() == [*first, 28, 29, 30, 31, 4, 5, -1]


def test_a_scale_that_may_be_skipped_changes_no_row() -> None:
    gpu_ops.register()
    kv_c, k_pe, slots = torch.randn(3, 8), torch.randn(3, 4), torch.tensor([2, -1, 0])
    rows = []
    for more in ((), (True,)):
        cache = torch.zeros(2, 2, 12)
        torch.ops._C_cache_ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "auto", torch.ones(1), *more)
        rows.append(cache)
    assert torch.equal(*rows)
    assert torch.equal(rows[0].view(4, 12)[2], torch.cat([kv_c[0], k_pe[0]]))
