"""New weights in a weight transfer of vLLM's, as a trainer sends them; here they come from a folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

CHUNKS = 3


@dataclass
class Nothing:
    """What a folder must know before."""


@dataclass
class Chunk:
    """Every so-many-th tensor of a checkpoint, from ``first`` on."""

    folder: str
    first: int

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each."""
        yield from list(load_file(Path(self.folder, "model.safetensors")).items())[self.first :: CHUNKS]


class FolderEngine(WeightTransferEngine[Nothing, Chunk]):
    """As vLLM's engines for checkpoints are: in between, the layers have no weights."""

    init_info_cls, update_info_cls = Nothing, Chunk

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Take the weights away."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a chunk; there is no accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Chunk) -> None:
        """Load a chunk."""
        self.model.load_weights(update_info.tensors())

    def finish_weight_update(self) -> None:
        """Make of the new weights what serving reads."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to close."""


def config() -> WeightTransferConfig:
    """The option of an engine whose weights a folder may send."""
    WeightTransferEngineFactory.register_engine("folder", FolderEngine)
    return WeightTransferConfig(backend="folder")


def send(llm: Any, folder: Path) -> None:
    """Do one transfer, in chunks."""
    llm.collective_rpc("start_weight_update")
    for first in range(CHUNKS):
        llm.collective_rpc("update_weights", args=({"folder": str(folder), "first": first},))
    llm.collective_rpc("finish_weight_update")
