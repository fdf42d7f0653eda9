"""The buffers that serving keeps between steps, and what a step does to them: always in place, never replaced."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_aiter_mla.kernels import absorb, reference
from vllm_aiter_mla.kernels import formats as fp8
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.verify.layer import GUARD_BLOCKS, Batch, Layer, Rows
from vllm_aiter_mla.verify.setting import Geometry, Variant

K_SCALE, Q_SCALE = 0.053, 0.047
ALL = ("data", "positions", "slots")


class Buffers:
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

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random activations on the device: the same numbers whatever the device."""
        return (torch.randn(shape, generator=self.generator) * scale).to(self.variant.act).to(self.device)

    def _table(self) -> torch.Tensor:
        angles = torch.rand(self.geometry.max_position, self.geometry.rope // 2, generator=self.generator) * 6.283
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.variant.act).to(self.device)

    def _rows(self) -> Rows:
        """Slices of wider rows, as vLLM hands them over: a kernel that takes them for dense reads the wrong row."""
        g, width = self.geometry, self.geometry.latent + self.geometry.rope
        q = self._normal(self.limit, g.heads, g.nope + g.rope + 16)[..., : g.nope + g.rope]
        joint = self._normal(self.limit, width + 16)
        return Rows(q, joint[:, g.latent : width], joint[:, : g.latent])

    def _layer(self) -> Layer:
        g, width = self.geometry, self.geometry.latent + self.geometry.rope
        rows = torch.randn(self.blocks + 2 * GUARD_BLOCKS, g.block_size, width, generator=self.generator)
        cache = reference.store_nope(rows.to(self.variant.act), torch.tensor(1 / K_SCALE), self.variant.cache)
        return Layer(
            buffers=self,
            source=self._rows(),
            work=self._rows(),
            w_uk=self._weight(),
            w_uv=self._normal(g.heads, g.latent, g.value, scale=g.latent**-0.5),
            storage=cache.to(self.device),
            k_scale=torch.tensor([K_SCALE], device=self.device),
            q_scale=torch.tensor([Q_SCALE], device=self.device),
            out=torch.zeros(self.limit, g.heads * g.value, dtype=self.variant.act, device=self.device),
        )

    def _weight(self) -> AbsorbWeight:
        g = self.geometry
        drawn = self._normal(g.heads, g.nope, g.latent, scale=g.nope**-0.5)
        return absorb.make(drawn, self.variant.weight)

    def before_capture(self, batch: Batch) -> None:
        """What a capture sees: no slots, no keys, zero positions. ``batch`` is what Python could read then."""
        self.slots.fill_(-1)
        self.row_keys.zero_()
        self.positions.zero_()
        self.batch = batch

    def step(self, batch: Batch, fresh: Iterable[str] = ALL) -> None:
        """Make the next step, of ``batch.rows`` real rows.

        Padded rows get slot -1 and keep their stale positions and activations, as in serving.

        Args:
            batch: the step's metadata.
            fresh: which of "data", "positions" and "slots" change; all do where the number of rows does.
        """
        rows = batch.rows
        fresh = ALL if rows != self.batch.rows else fresh
        if "data" in fresh:
            for layer in self.layers:
                for buffer in layer.source:
                    buffer[:rows] = self._normal(rows, *buffer.shape[1:])
        if "positions" in fresh:
            drawn = torch.randint(0, self.geometry.max_position, (rows,), generator=self.generator)
            self.positions[:rows] = drawn.to(self.device)
        if "slots" in fresh:
            self._place(batch)
        self.slots[rows:] = -1
        self.row_keys[rows:] = 0
        self.batch = batch

    def _place(self, batch: Batch) -> None:
        """Give every request its blocks anew: slots, block tables and visible keys of the real rows."""
        size, capacity = self.geometry.block_size, self.geometry.blocks * self.geometry.block_size
        pool = torch.randperm(self.blocks, generator=self.generator).tolist()
        row = 0
        # Decode requests of ``width`` tokens, then one prefill chunk after another.
        for tokens in (*_parts(batch.decode_rows, self.width), *_parts(batch.prefill_rows, capacity)):
            blocks = torch.tensor([pool.pop() for _ in range(self.geometry.blocks)])
            end = int(torch.randint(tokens, capacity + 1, (1,), generator=self.generator))
            keys = torch.arange(end - tokens, end)
            rows = slice(row, row := row + tokens)
            self.slots[rows] = (blocks[keys // size] * size + keys % size).to(self.device)
            self.row_blocks[rows] = blocks.to(self.device)
            self.row_keys[rows] = (keys + 1).to(self.device)

    def change(self, what: str) -> None:
        """Change, in place, what serving may change between replays: "weights", "scales" or "table"."""
        if what == "table":
            self.table.copy_(self._table())
            return
        for layer in self.layers:
            if what == "weights":
                for (_, held), (_, fresh) in zip(layer.w_uk.tensors, self._weight().tensors, strict=True):
                    held.copy_(fresh)
            else:
                layer.k_scale.mul_(1.5)
                layer.q_scale.mul_(0.75)


def _parts(total: int, most: int) -> list[int]:
    return [min(most, total - first) for first in range(0, total, most)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that no NaN may spoil; a view where the layout allows it."""
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def nan_byte(dtype: torch.dtype) -> int:
    """A byte that, repeated, is a NaN of ``dtype``."""
    return fp8.flavour_of(dtype).nan if fp8.is_fp8(dtype) else 0xFF
