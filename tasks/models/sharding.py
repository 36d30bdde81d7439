"""A policy sharded over ranks, by torch's FSDP2 (`fully_shard`; Zhao et al., arXiv 2304.11277).

Every rank stores some rows of every parameter, of its gradient and of AdamW's moments, in float32.
A layer is gathered only while it computes, in the dtype of its computation. Gradients are summed
over ranks, as without sharding: each rank already divides by the totals of the step. All ranks must
make the same number of forward and backward passes, since each pass gathers. With replicas (HSDP)
the ranks form groups. Each group stores the whole policy, so gathers stay within a group."""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from tasks.models.packing import layers_of
from tasks.models.weights import is_sharded

P = ParamSpec("P")
T = TypeVar("T")


def shard(
    model: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    forwards: Iterable[Callable[..., Any]],
    replicas: int = 1,
) -> None:
    """Shard `model`, which may have no weights yet (see `load_model`), onto `device`, over all
    ranks or over the ranks of each of `replicas` groups. Each layer is gathered separately, in
    `dtype`. All other modules, such as embeddings and head, are gathered together and compute in
    float32. `forwards` are the functions that `call` may run on the model."""
    size = distributed.get_world_size()
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # autocast casts the inputs
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # also free the root's parameters after a forward: without a backward they would stay gathered
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # sum gradients over ranks, without averaging
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for function in forwards:
        setattr(model, function.__name__, MethodType(function, model))
        register_fsdp_forward_method(model, function.__name__)


def call(
    function: Callable[Concatenate[PreTrainedModel, P], T],
    model: PreTrainedModel,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Return `function(model, ...)`, where `function` is not `model.forward`. On a sharded model it
    runs as a method that `shard` has added: a plain call would not gather the parameters of the
    root module, which include embeddings and head."""
    if is_sharded(model):
        result: T = getattr(model, function.__name__)(*args, **kwargs)
        return result
    return function(model, *args, **kwargs)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: torch.Tensor) -> slice | None:
    """Return the range of a tensor's rows on this rank; None if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return slice(offset[0], offset[0] + shape[0])


def sharded_like(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's `rows` as part of a tensor that is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return rows
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(rows, mesh, placements, shape=tensor.shape, stride=tensor.stride())
