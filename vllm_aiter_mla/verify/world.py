"""The buffers that serving keeps between steps, and what a step does to them: always in place, never replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import fp8, reference
from vllm_aiter_mla.kernels.absorb import PlainWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.verify.setting import Geometry, Variant

# Blocks before and after the cache: what a bug writes out of bounds stays inside the allocation, and is seen.
GUARD_BLOCKS = 2
K_SCALE, Q_SCALE = 0.053, 0.047


@dataclass(frozen=True, slots=True)
class Batch:
    """What Python knows of a step, in the place of vLLM's attention metadata.

    Attributes:
        rows: real rows; the rest of the padded size has slot -1 and whatever the last step left.
        prefill_rows: how many of them, the last ones, belong to a prefill.
        dummy: no metadata at all, as while a piecewise graph is captured.
    """

    rows: int
    prefill_rows: int = 0
    dummy: bool = False

    @property
    def decode_rows(self) -> int:
        """Real rows of decode requests."""
        return self.rows - self.prefill_rows


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's own tensors.

    Attributes:
        q: [L, N, P+R] act, not rotated; a slice of wider rows.
        k_pe: [L, R] act, a slice of one tensor with kv_c.
        kv_c: [L, latent] act.
        w_uk_t: [N, P, latent] act.
        w_uv: [N, latent, V] act.
        storage: [GUARD + blocks + GUARD, block_size, latent+R], the cache between its guards.
        k_scale: one float32.
        q_scale: one float32.
        out: [L, N*V] act, the attention's output.
    """

    q: torch.Tensor
    k_pe: torch.Tensor
    kv_c: torch.Tensor
    w_uk_t: torch.Tensor
    w_uv: torch.Tensor
    storage: torch.Tensor
    k_scale: torch.Tensor
    q_scale: torch.Tensor
    out: torch.Tensor

    @property
    def kv_cache(self) -> torch.Tensor:
        """[blocks, block_size, latent+R] without the guards."""
        return self.storage[GUARD_BLOCKS:-GUARD_BLOCKS]


class World:
    """Everything a captured graph may hold an address of.

    Args:
        geometry: the layer's widths.
        variant: dtypes and rotary style.
        limit: L, rows of every buffer.
        layers: how many layers share a step.
        width: tokens a decode request brings, 1 + number of drafts.
        device: torch device.
        seed: of everything random here.
    """

    def __init__(
        self, geometry: Geometry, variant: Variant, limit: int, layers: int, width: int, device: str, seed: int
    ) -> None:
        self.geometry, self.variant, self.limit, self.width, self.device = geometry, variant, limit, width, device
        self.generator = torch.Generator().manual_seed(seed)
        self.blocks = limit * geometry.blocks + 1
        self.table = self._table()
        self.positions = torch.zeros(limit, dtype=torch.int64, device=device)
        self.slots = torch.full((limit,), -1, dtype=torch.int64, device=device)
        self.row_blocks = torch.zeros((limit, geometry.blocks), dtype=torch.int64, device=device)
        self.row_keys = torch.zeros(limit, dtype=torch.int64, device=device)
        self.layers = tuple(self._layer() for _ in range(layers))
        self.batch = Batch(0, dummy=True)
        self.last_rows = 0

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random activations on the device: the same numbers whatever the device."""
        return (torch.randn(shape, generator=self.generator) * scale).to(self.variant.act).to(self.device)

    def _table(self) -> torch.Tensor:
        angles = torch.rand(self.geometry.max_position, self.geometry.rope // 2, generator=self.generator) * 6.283
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.variant.act).to(self.device)

    def _layer(self) -> Layer:
        g, width = self.geometry, self.geometry.latent + self.geometry.rope
        # Slices of wider rows, as vLLM hands them over: a kernel that takes them for dense reads the wrong row.
        q = self.normal(self.limit, g.heads, g.nope + g.rope + 16)[..., : g.nope + g.rope]
        joint = self.normal(self.limit, width + 16)
        rows = torch.randn(self.blocks + 2 * GUARD_BLOCKS, g.block_size, width, generator=self.generator)
        cache = reference.store_nope(rows.to(self.variant.act), torch.tensor(1 / K_SCALE), self.variant.cache)
        return Layer(
            q=q,
            k_pe=joint[:, g.latent : width],
            kv_c=joint[:, : g.latent],
            w_uk_t=self.normal(g.heads, g.nope, g.latent, scale=g.nope**-0.5),
            w_uv=self.normal(g.heads, g.latent, g.value, scale=g.latent**-0.5),
            storage=cache.to(self.device),
            k_scale=torch.tensor([K_SCALE], device=self.device),
            q_scale=torch.tensor([Q_SCALE], device=self.device),
            out=torch.zeros(self.limit, g.heads * g.value, dtype=self.variant.act, device=self.device),
        )

    def inputs(self, layer: Layer, size: int, slots: int | None = None) -> DecodeInputs:
        """The operands of one layer at a padded size: views, so that a graph sees what the next step writes."""
        return DecodeInputs(
            q=layer.q[:size],
            k_pe=layer.k_pe[:size],
            kv_c=layer.kv_c[:size],
            weight=PlainWeight(layer.w_uk_t),
            kv_cache=layer.kv_cache,
            slot_mapping=self.slots[: size if slots is None else slots],
            positions=self.positions[:size],
            cos_sin_cache=self.table,
            k_scale=layer.k_scale,
            q_scale=layer.q_scale,
            is_neox=self.variant.is_neox,
            out_dtype=self.variant.out,
        )

    def before_capture(self, size: int, batch: Batch) -> None:
        """What a capture sees: no slots, no keys, zero positions. ``batch`` is what Python could read then."""
        self.slots.fill_(-1)
        self.row_keys.zero_()
        self.positions.zero_()
        self.batch = batch
        self.last_rows = 0

    def step(self, size: int, batch: Batch, fresh: Iterable[str] = ("data", "positions", "slots")) -> None:
        """Make the next step: ``batch.rows`` real rows under a padded ``size``.

        Padded rows get slot -1 and keep their stale positions and activations, as in serving.

        Args:
            size: padded rows.
            batch: the step's metadata.
            fresh: which of "data", "positions" and "slots" change; what has not been set yet always does.
        """
        rows = batch.rows
        fresh = {"data", "positions", "slots"} if rows != self.last_rows else set(fresh)
        if "data" in fresh:
            for layer in self.layers:
                for buffer in (layer.q, layer.k_pe, layer.kv_c):
                    buffer[:rows] = self.normal(rows, *buffer.shape[1:])
        if "positions" in fresh:
            drawn = torch.randint(0, self.geometry.max_position, (rows,), generator=self.generator)
            self.positions[:rows] = drawn.to(self.device)
        if "slots" in fresh:
            self._place(batch)
        self.slots[rows:] = -1
        self.row_keys[rows:] = 0
        self.batch, self.last_rows = batch, rows

    def _place(self, batch: Batch) -> None:
        """Give every request its blocks anew: slots, block tables and visible keys of the real rows."""
        size, capacity = self.geometry.block_size, self.geometry.blocks * self.geometry.block_size
        pool = torch.randperm(self.blocks, generator=self.generator).tolist()
        row = 0
        for tokens in self._requests(batch, capacity):
            blocks = torch.tensor([pool.pop() for _ in range(self.geometry.blocks)])
            end = int(torch.randint(tokens, capacity + 1, (1,), generator=self.generator))
            keys = torch.arange(end - tokens, end)
            rows = slice(row, row := row + tokens)
            self.slots[rows] = (blocks[keys // size] * size + keys % size).to(self.device)
            self.row_blocks[rows] = blocks.to(self.device)
            self.row_keys[rows] = (keys + 1).to(self.device)

    def _requests(self, batch: Batch, capacity: int) -> list[int]:
        """Tokens of each request: decode requests of ``width``, then one prefill chunk after another."""
        return _parts(batch.decode_rows, self.width) + _parts(batch.prefill_rows, capacity)

    def change(self, what: str) -> None:
        """Change, in place, what serving may change between replays: "weights", "scales" or "table".

        Raises:
            ValueError: an unknown ``what``.
        """
        if what == "table":
            self.table.copy_(self._table())
            return
        for layer in self.layers:
            if what == "weights":
                layer.w_uk_t.copy_(self.normal(*layer.w_uk_t.shape, scale=self.geometry.nope**-0.5))
            elif what == "scales":
                layer.k_scale.mul_(1.5)
                layer.q_scale.mul_(0.75)
            else:
                raise ValueError(f"nothing called {what!r} changes between replays")


def _parts(total: int, most: int) -> list[int]:
    return [min(most, total - first) for first in range(0, total, most)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that no NaN may spoil; a view where the layout allows it."""
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def nan_byte(dtype: torch.dtype) -> int:
    """A byte that, repeated, is a NaN of ``dtype``."""
    return fp8.flavour_of(dtype).nan if fp8.is_fp8(dtype) else 0xFF
