# SPDX-License-Identifier: Apache-2.0
"""What must hold after a step, each rule under its own name."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import EXACT, OWN_BMM, KernelBackend
from vllm_aiter_mla.kernels.distance import difference, norm_bound, why_off
from vllm_aiter_mla.kernels.inputs import GUARD_ROWS, DecodeInputs, with_guards
from vllm_aiter_mla.verify.engine import Recording
from vllm_aiter_mla.verify.layer import GUARD_BLOCKS, Buffers, Layer, Outputs, Rows, raw
from vllm_aiter_mla.verify.results import Finding

ORACLES: dict[str, str] = {
    "runs": "the step runs, and its capture succeeds",
    "shape-and-dtype": "a query is prepared for decode batches only, with the rows, shape and dtype that are read",
    "query-nope": "the query's un-rotated half is the reference's: to the bit, or with its own BMM one step off on 2 %",
    "query-rope": "the query's rotated half is the reference's: to the bit, or one step off on 1 % of the values",
    "query-elsewhere": "no byte before or behind the prepared query is written by a replay",
    "finite": "compared rows hold no NaN and no Inf, but for an fp8 overflow where the back end says that it gives NaN",
    "cache-rows": "the written cache rows are the reference's",
    "cache-elsewhere": "every other byte of the cache, and of the guards around it, is what it was",
    "inputs-unchanged": "operands are what they were, but for the rope parts of real rows in a batch with prefill rows",
    "attention-output": "the attention's output is that of a reference attention, within 2 % of a row's length",
    "no-sync": "nothing waits for the device while a graph is captured",
    "no-table-copy": "no call copies the cos/sin table",
    "memory": "replays ask for no memory, and thousands of them hold no more of it",
    "launches": "a layer launches what its back end should",
}  # fmt: skip

ROW_ERROR = 0.02


class Expected:
    """Copies of all operands before a step, and the expected result of each layer. Make it after ``Buffers.step``.

    ``size`` is T, ``rows`` the rows that are prepared if the batch has decode rows only.
    """

    def __init__(self, buffers: Buffers, backend: KernelBackend, size: int, rows: int) -> None:
        self._buffers, attends = buffers, buffers.case.kind != "kernel"  # else the preparation alone runs
        self._copies = {name: tensor.clone() for name, tensor in _operands(buffers)}
        self._layers = [_ExpectedLayer(backend, layer, layer.inputs(rows), attends) for layer in buffers.layers]
        self._produced = size if attends else 0

    @property
    def writes_nan(self) -> bool:
        """Whether a query or KV row that was checked held NaN: an fp8 overflow in a kernel that does not saturate."""
        return any(layer.writes_nan for layer in self._layers)

    def check(self, outputs: Outputs) -> list[Finding]:
        """Return what the step, which has run, broke."""
        findings: list[Finding] = []
        for i, layer in enumerate(self._layers):
            broken = layer.check(outputs.get(("query", i)), outputs.get(("final", i)), self._copies["slot_mapping"])
            findings += [replace(finding, message=f"layer {i}: {finding.message}") for finding in broken]
        pairs = [(name, tensor, self._copies[name]) for name, tensor in _operands(self._buffers)]
        for i, own in enumerate(self._buffers.layers):
            names = (f"work buffer {name} of layer {i}" for name in Rows._fields)
            pairs += zip(names, own.work.first(self._produced), self._worked(own), strict=True)
        changed = [name for name, tensor, wanted in pairs if not torch.equal(raw(tensor), raw(wanted))]
        return findings + [Finding("inputs-unchanged", f"{name} was changed by the step") for name in changed]

    def _worked(self, own: Layer) -> Rows:
        """Return what the work buffers should hold: their source, or what they do hold where a mixed batch rotates."""
        batch, size, nope = self._buffers.batch, self._produced, self._buffers.geometry.nope
        wanted = Rows(*(rows.clone() for rows in own.source.first(size)))
        if batch.num_prefills:
            wanted.q[: batch.rows, :, nope:] = own.work.q[: batch.rows, :, nope:]
            wanted.k_pe[: batch.rows] = own.work.k_pe[: batch.rows]
        return wanted


class _ExpectedLayer:
    """One layer's operands and cache before a step, and the expected result for each accepted rounding."""

    def __init__(self, backend: KernelBackend, own: Layer, inputs: DecodeInputs, attends: bool) -> None:
        self.own, self.inputs = own, inputs
        batch = own.buffers.batch
        # No rule says what comes of padded rows that hold NaN or the largest number.
        self.num_compared = inputs.num_tokens if own.buffers.case.padding is None else batch.rows
        self.exact_nope = backend.bounds == EXACT
        # Two results equal the reference to the bit: its own rotation, and what the layer writes of mixed batches.
        self.exact_rope = backend.name == "reference" or batch.num_prefills > 0
        self.storage = own.storage.clone()
        # As in the self-check: a product that quantises q is compared by its norm, and everything after it must
        # follow from the product that the kernel made.
        self.bound = inputs.weight.product_bound
        self.product = backend.absorbed(inputs) if self.bound else None
        self.queries: list[torch.Tensor] = []
        self.writes_nan = False
        shadows: list[Layer] = []
        # AITER's truncating store and its overflow are known from its source only.
        several = backend.numerics(inputs).accepted()
        for numerics in () if batch.dummy or batch.num_prefills else several:
            shadows.append(replace(own, storage=own.storage.clone()))
            cache = shadows[-1].kv_cache
            query = reference.prepare(replace(inputs, kv_cache=cache), numerics, self.product)
            self.queries.append(inputs.real_heads(query))
        shadows = shadows or [replace(own, storage=own.storage.clone())]
        self.out = _attended(shadows[0], self.queries) if attends and not batch.dummy else None
        self.storages = [shadow.storage for shadow in shadows]

    def check(self, got: torch.Tensor | None, final: torch.Tensor | None, slots: torch.Tensor) -> Iterator[Finding]:
        """Yield what is wrong with this layer's query, cache and attention output."""
        if got is not None and got.shape[1] == self.inputs.out_heads:
            got = self.inputs.real_heads(got)  # a kernel may fill the others with anything, or leave them out
        was, wanted = _described(got), _described(self.queries[0] if self.queries else None)
        if was != wanted:
            yield Finding("shape-and-dtype", f"{wanted} expected, {was} prepared")
            got = None
        got = got if got is None else got[: self.num_compared]
        written = slots[slots >= 0] + GUARD_BLOCKS * self.storage.shape[1]
        rows = _rows_at(self.own.storage, written)
        self.writes_nan = any(bool(part.float().isnan().any()) for part in (got, rows) if part is not None)
        # One rounding has to explain the query and the cache together, as in the self-check.
        explanations = [
            [*self._query_findings(got, query), *self._cache_findings(rows, _rows_at(cache, written))]
            for query, cache in zip(self.queries or (None,), self.storages, strict=True)
        ]
        yield from min(explanations, key=len)
        yield from _written_elsewhere(self.own, self.storage, written)
        yield from self._output_findings(final)

    def _query_findings(self, got: torch.Tensor | None, expected: torch.Tensor | None) -> Iterator[Finding]:
        if got is None or expected is None:
            return
        lat, expected = self.inputs.latent_dim, expected[: self.num_compared]
        bad = _rows_not_finite(got)
        if bad and not torch.equal(got.float().isnan(), expected.float().isnan()):
            yield Finding("finite", f"q_prepared holds NaN or Inf in {bad}")
            return
        nope = _why_apart(got[..., :lat], expected[..., :lat], self.exact_nope, OWN_BMM.slack, OWN_BMM.nope_share)
        nope = self._by_norm(nope, got[..., :lat], expected[..., :lat])
        rope = _why_apart(got[..., lat:], expected[..., lat:], self.exact_rope)
        yield from (Finding(name, reason) for name, reason in (("query-nope", nope), ("query-rope", rope)) if reason)

    def _by_norm(self, reason: str, got: torch.Tensor, expected: torch.Tensor) -> str:
        """Return why the un-rotated half is wrong, by its norm if the weight's format sets a bound for the product."""
        if not self.bound:
            return reason
        if self.exact_nope:
            rows = self.num_compared
            wanted = self.inputs.weight.reference(self.inputs.q_nope[:rows])
            if reason or self.product is None or not rows:
                return reason
            off = why_off(self.product[:rows], wanted, self.bound)
            return f"the absorb product is {off}" if off else ""
        return why_off(got, expected, norm_bound(self.bound, got.dtype))  # the product is inside the launch

    def _cache_findings(self, got: torch.Tensor, expected: torch.Tensor) -> Iterator[Finding]:
        lat = self.inputs.latent_dim
        latent = _why_apart(got[:, :lat], expected[:, :lat], exact=True)
        rope = _why_apart(got[:, lat:], expected[:, lat:], self.exact_rope)
        for part, reason in (("latent", latent), ("rotated", rope)):
            if reason:
                yield Finding("cache-rows", f"{part} part of the written rows: {reason}")

    def _output_findings(self, final: torch.Tensor | None) -> Iterator[Finding]:
        batch, out = self.own.buffers.batch, self.own.out
        n = batch.rows
        if self.out is None or not n:
            return
        got, wanted = out[:n].float(), self.out.float()
        if bad := _rows_not_finite(got):
            yield Finding("finite", f"the attention's output holds NaN or Inf in {bad}")
            return
        error = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
        if float(error.max()) > ROW_ERROR:
            row = int(error.argmax())
            kind = "prefill" if row >= batch.decode_rows else "decode"
            yield Finding("attention-output", f"{kind} row {row} is off by {float(error.max()):.0%}")
        if final is not None and not torch.equal(raw(final[:n]), raw(out[:n] * 2)):
            yield Finding("attention-output", "what follows the attention did not see its output")


def _attended(layer: Layer, queries: list[torch.Tensor]) -> torch.Tensor:
    """Return [n, N*V] of the real rows. Without a query the layer's own attention runs and writes the KV rows too."""
    buffers, batch, n = layer.buffers, layer.buffers.batch, layer.buffers.batch.rows
    out = torch.empty_like(layer.out[:n])
    if queries:
        layer.v_up(layer.forward_mqa(queries[0][:n], layer.kv_cache, batch), out)
        return out
    q, k_pe, kv_c = (tensor.clone() for tensor in layer.source.first(n))
    rope = layer.rope(buffers.positions[:n])
    k_rotated = layer.rotate(q[..., buffers.geometry.nope :], k_pe.unsqueeze(1), rope)
    layer.write(kv_c, k_rotated, buffers.slots[:n], batch, rope)
    layer.vllm_forward(q, kv_c, k_rotated, batch, out)
    return out


def _described(query: torch.Tensor | None) -> str:
    return "no query" if query is None else f"{list(query.shape)} {str(query.dtype).removeprefix('torch.')}"


def _operands(buffers: Buffers) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (
        ("positions", buffers.positions),
        ("slot_mapping", buffers.slots),
        ("block table", buffers.row_blocks),
        ("sequence lengths", buffers.row_keys),
    )
    for i, layer in enumerate(buffers.layers):
        named = [(name, getattr(layer, name)) for name in ("table", "w_uv", "k_scale", "q_scale")]
        named += [(name, torch.atleast_1d(tensor)) for name, tensor in layer.w_uk.tensors]
        yield from ((f"{name} of layer {i}", tensor) for name, tensor in (*named, *layer.source._asdict().items()))


def _rows_not_finite(x: torch.Tensor) -> str:
    """Return which rows hold NaN or Inf, or an empty string."""
    bad = (~x.float().isfinite().flatten(1).all(dim=1)).nonzero().flatten().tolist()
    return f"row(s) {', '.join(map(str, bad[:6]))}{' ...' if len(bad) > 6 else ''}" if bad else ""


def _rows_at(storage: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return copies of the rows at ``slots`` [n] of a cache with its guards: [n, latent+R]."""
    return raw(storage.flatten(0, 1)).index_select(0, slots).view(storage.dtype)


def _why_apart(
    got: torch.Tensor, expected: torch.Tensor, exact: bool, slack: float = 0.0, share: float = EXACT.rope_share
) -> str:
    """Return how far ``got`` is from ``expected``, or an empty string if they agree."""
    distance = difference(got.contiguous(), expected.contiguous(), slack)
    if torch.equal(raw(got), raw(expected)) or (not exact and distance.steps <= 1 and distance.share <= share):
        return ""
    wrong = (got.float() != expected.float()).nonzero()
    where = f", first at {wrong[0].tolist()}" if wrong.numel() else ""
    allowed = "none may" if exact else f"one step on {share:.0%} may"
    return f"{distance.share:.1%} of the values differ, up to {distance.steps} step(s){where}; {allowed}"


def _written_elsewhere(layer: Layer, storage: torch.Tensor, written: torch.Tensor) -> Iterator[Finding]:
    changed = (raw(layer.storage) != raw(storage)).flatten(0, 1).any(dim=1)
    changed[written] = False
    if bool(changed.any()):
        first = int(changed.nonzero()[0]) - GUARD_BLOCKS * layer.storage.shape[1]
        what = "cache row(s) that belong to no slot of the step were written, first slot"
        yield Finding("cache-elsewhere", f"{int(changed.sum())} {what} {first}")


def check_guards(query: torch.Tensor) -> list[Finding]:
    """Check the rows around a query that a replay has written; before the replay all of them were NaN."""
    whole = with_guards(query)
    if whole is query:
        return []
    guards = torch.cat((whole[:GUARD_ROWS].float(), whole[-GUARD_ROWS:].float()))
    written = (~guards.isnan()).flatten(1).any(dim=1).nonzero().flatten() - GUARD_ROWS
    rows = [row if row < 0 else len(query) + row for row in written.tolist()]
    return [Finding("query-elsewhere", f"row(s) {rows[:6]} of {len(query)} were written")] if rows else []


def check_probe(probe: Recording, table_rows: int) -> list[Finding]:
    """Check one call before the capture for synchronisations and for copies as long as the table."""
    findings = []
    if probe.syncs:
        findings.append(Finding("no-sync", f"the call waits for the device: {', '.join(sorted(set(probe.syncs)))}"))
    copies = [f"{name} -> {list(shape)}" for name, shape in probe.shapes if table_rows in shape]
    if copies:
        findings.append(Finding("no-table-copy", f"every call makes a copy of the cos/sin table: {copies[0]}"))
    return findings
