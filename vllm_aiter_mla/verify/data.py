# SPDX-License-Identifier: Apache-2.0
"""The activations, weights and cache rows of a run: drawn and rounded once on the CPU, after that only copied.

A case at 1,024 tokens has a cache of 113 million values. Drawing and rounding them for each case took minutes of one
core, while the card waited. The card copies values and computes none, so they do not depend on it.
"""

from functools import lru_cache

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.verify.cases import ACT

# A prime. A larger tensor starts again at the first value, and no two of its rows at the same one.
DRAWN = 4_194_301


class Pool:
    """``DRAWN`` values of a normal distribution, and what they are rounded to, on one device.

    Args:
        seed: of the values.
        device: where the rounded values are.
        act: the activation dtype.
    """

    def __init__(self, seed: int, device: str, act: torch.dtype = ACT) -> None:
        self._values = torch.randn(DRAWN, generator=torch.Generator().manual_seed(seed))
        self._device, self._act = device, act
        self._stored: dict[tuple[torch.dtype, float], torch.Tensor] = {}

    def activations(self, shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
        """Return a new tensor of ``scale`` times the values, in the activation dtype."""
        if (self._act, scale) not in self._stored:
            self._stored[self._act, scale] = (self._values * scale).to(self._act).to(self._device)
        return _turned(self._stored[self._act, scale], shape, generator)

    def cache_rows(
        self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, inverse: float
    ) -> torch.Tensor:
        """Return a new tensor of the values as a cache of ``dtype`` stores them: fp8 times ``inverse``, saturated."""
        if (dtype, inverse) not in self._stored:
            rows = reference.store_nope(self._values.to(self._act), torch.tensor(inverse), dtype)
            self._stored[dtype, inverse] = rows.to(self._device)
        return _turned(self._stored[dtype, inverse], shape, generator)


@lru_cache(maxsize=1)
def pool(seed: int, device: str, act: torch.dtype = ACT) -> Pool:
    """Return the pool of a seed. It stays until another one is asked for."""
    return Pool(seed, device, act)


def _turned(stored: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Copy as many values as ``shape`` has from a place that ``generator`` draws on, round and round."""
    values = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored  # fp8 cannot be concatenated everywhere
    first = int(torch.randint(len(values), (1,), generator=generator))
    rounds, rest = divmod(first + torch.Size(shape).numel(), len(values))
    parts = [values] * rounds + [values[:rest]]
    parts[0] = parts[0][first:]
    return torch.cat(parts).view(stored.dtype).view(shape)
