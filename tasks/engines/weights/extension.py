"""Inside a vLLM server: take new weights from safetensors files (the backend `file` of vLLM's own
weight transfer). The server imports this by its option `--worker-extension-cls`; nothing else does.

vLLM has backends for NCCL and CUDA IPC. This one needs neither a GPU nor pickle."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
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

from tasks.engines.weights.vllm_model import HEAD, has_head, pack_experts


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing needs to be agreed on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Some of the weights: a safetensors file that the server can read."""

    path: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Weights in the policy's own names and shapes, some in each of several files."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # vLLM's own method asks for an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        takes_head = has_head(self.model)
        with safe_open(update_info.path, framework="pt", device=str(self.device)) as file:
            self.model.load_weights(  # type: ignore[operator]
                (name, file.get_tensor(name))
                for name in file.keys()  # noqa: SIM118
                if takes_head or name != f"{HEAD}.weight"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        if self.device.type == "cpu":
            pack_experts(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


WeightTransferEngineFactory.register_engine("file", FileTransfer)


class Extension:
    """vLLM wants a class to be named; it is enough that it imports this module."""
