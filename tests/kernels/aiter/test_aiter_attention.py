"""The stand-ins for AITER's attention kernels, against attention written out; no vLLM, no engine."""

import pytest
import torch

from tests.sandbox.simulated_aiter import mla

N, L, R, SCALE = 16, 8, 4, 0.3
# Two requests with two rows each, over seven and four keys that lie anywhere in the cache.
ROWS, KEYS = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 7, 11], dtype=torch.int32)
PLACES = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:11].to(torch.int32)
PLAN = ("work_meta_data", "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def written_out(q, cache):
    """Row j of a request's two sees all keys but the 1 - j last ones."""
    out = []
    for row in range(4):
        first, end = KEYS[row // 2], KEYS[row // 2 + 1] - (1 - row % 2)
        keys = cache[PLACES[first:end].long()]
        out.append(((q[row] @ keys.T) * SCALE).softmax(-1) @ keys[:, :L])
    return torch.stack(out)


def plan(rows=ROWS, keys=KEYS):
    sizes = mla.get_mla_metadata_info_v1(2, 2, N, torch.float32, torch.float32)
    # AITER's order of the buffers when it sizes them is not its order when it fills them.
    names = ("work_meta_data", "work_indptr", "work_info_set", *PLAN[3:])
    buffers = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in zip(names, sizes, strict=True)}
    ones = torch.ones(2, dtype=torch.int32)
    given = [buffers[name] for name in PLAN]
    mla.get_mla_metadata_v1(rows, keys, ones, N, 1, True, *given, max_seqlen_qo=2, dtype_q=None, dtype_kv=None)
    return buffers


def decode(q, cache, **more):
    o = torch.empty(4, N, L)
    ones = torch.ones(2, dtype=torch.int32)
    mla.mla_decode_fwd(q, cache.view(-1, 1, 1, L + R), o, ROWS, KEYS, PLACES, ones, 2, sm_scale=SCALE, **more)
    return o


@pytest.mark.parametrize("planned", [False, True])
def test_decode_attends_causally_over_the_keys_of_its_request(planned):
    q, cache = drawn(4, N, L + R), drawn(20, L + R)
    found = decode(q, cache, **(plan() if planned else {}))
    torch.testing.assert_close(found, written_out(q, cache))


@pytest.mark.mutation
def test_mutation_a_plan_of_another_batch_gives_other_results():
    q, cache = drawn(4, N, L + R), drawn(20, L + R)
    stale = plan(keys=KEYS + torch.tensor([0, -1, 0], dtype=torch.int32))
    assert not torch.allclose(decode(q, cache, **stale), written_out(q, cache))


def test_fp8_codes_are_scaled_on_both_sides():
    q, cache = drawn(4, N, L + R).to(torch.float8_e4m3fn), drawn(20, L + R).to(torch.float8_e4m3fn)
    found = decode(q, cache, q_scale=torch.tensor(0.7), kv_scale=torch.tensor(0.5))
    torch.testing.assert_close(found, written_out(q.float() * 0.7, cache.float() * 0.5))


def test_the_kernel_for_few_heads_takes_several_rows_of_a_request():
    q, cache, o = drawn(4, 3, L + R), drawn(20, L + R), torch.empty(4, 3, L)
    nope, pe = q.view(2, 2, 3, L + R).split([L, R], -1)
    mla.mla_gluon(nope, pe, cache, o.view(2, 2, 3, L), PLACES, KEYS, SCALE)
    torch.testing.assert_close(o, written_out(q, cache))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill_is_torchs_attention_with_its_lse(causal):
    q, k, v = drawn(5, N, L + R), drawn(5, N, L + R), drawn(5, N, L)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    found, lse = mla.flash_attn_varlen_func(q, k, v, bounds, bounds, 3, 3, SCALE, causal, return_lse=True)
    for first, end in ((0, 2), (2, 5)):
        parts = (x[first:end].transpose(0, 1) for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal, scale=SCALE)
        torch.testing.assert_close(found[first:end], expected.transpose(0, 1))
    last = (torch.einsum("nw,knw->nk", q[4], k[2:5]) * SCALE).logsumexp(-1)
    torch.testing.assert_close(lse[:, 4], last)
