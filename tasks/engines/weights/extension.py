"""The backend `file` of vLLM's weight transfer: it loads new weights from safetensors files. Only a
vLLM server imports this module, through its option `--worker-extension-cls`.

vLLM has backends for NCCL and CUDA IPC. This one needs neither a GPU nor pickle."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tasks.engines.weights import changes
from tasks.engines.weights.vllm_model import HEAD, has_head, pack_experts


@dataclass
class FileInit(WeightTransferInitInfo):
    """The empty setup of the backend: files need no setup."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The path of a safetensors file with some of the weights, readable by the server, and the
    paths of the changes to them."""

    path: str
    changes: list[str] = field(default_factory=list)


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads weights with the policy's own names and shapes, split over several files."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing: files need no connection."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # vLLM's own method needs an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        takes_head, dtype = has_head(self.model), self.model_config.dtype
        self.model.load_weights(  # type: ignore[operator]
            (name, weight.to(dtype) if weight.is_floating_point() else weight)
            for name, weight in changes.read(
                update_info.path, update_info.changes, str(self.device)
            )
            if takes_head or name != f"{HEAD}.weight"
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        if self.device.type == "cpu":
            pack_experts(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


WeightTransferEngineFactory.register_engine("file", FileTransfer)


class Extension:
    """The class for vLLM's option. It exists only to import this module."""
