"""Weights sharded over the trainer's ranks with FSDP2, and their publication (decisions/004-fully-shard.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from inflight.bus import Listener
from inflight.config import RunConfig
from inflight.trainer.coordinator import Coordinator, CoordinatorError
from inflight.weights.adapter import AdapterSource
from inflight.weights.source import WeightSource
from inflight.weights.transport.rendezvous import KeyValueStore

GROUP_TIMEOUT_FACTOR = 2
"""The process group's own timeout, in multiples of the trainer's: ours fires first and can name the missing ranks."""


def form_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Forms the process group of all ranks: NCCL on GPUs, where each rank uses the first GPU that it sees; gloo on
    CPUs.

    Raises RuntimeError when the other ranks do not join.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one host, whose name may not resolve
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore("trainer", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_FACTOR * timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
    )


@contextmanager
def assembled(config: RunConfig, device: torch.device) -> Iterator[Coordinator]:
    """The coordinator at rank 0, with its process group; a trainer of one rank has neither others nor a group.

    An error caused by a lost rank names that rank. Raises CoordinatorError when not all ranks join.
    """
    settings = config.trainer
    if settings.processes == 1:
        yield Coordinator(None, config)
        return
    with Listener(config.listening("ranks"), config.bus) as listener:
        coordinator = Coordinator(listener, config)
        store = KeyValueStore("", settings.rank_timeout_s)
        coordinator.wait_joined(config.publish.join_timeout_s, store.address)
        try:
            with coordinator.within_bound("meet"):
                form_group(store.tcp, 0, settings.processes, device, settings.rank_timeout_s)
            yield coordinator
        except CoordinatorError:
            raise
        except RuntimeError as error:
            raise CoordinatorError(coordinator.explain(error)) from error
        finally:
            coordinator.finish("the trainer ends")
        with coordinator.within_bound("leave"):  # after an error the process ends without the other ranks
            dist.destroy_process_group()


def shard(
    root: nn.Module,
    model: PreTrainedModel,
    fill: Callable[[nn.Module], None],
    *,
    bfloat16: bool,
    device: torch.device,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Shards each block of `model`, and with `root`, whose forward calls it, the rest: embeddings and output layer.

    These are one unit because they may be tied. Parameters, gradients and optimizer state stay float32; with `bfloat16`
    a block is gathered, and computes, in bfloat16, and gradients are averaged over ranks in float32. `fill` is called
    for each unit right before it is sharded, and gives its parameters their values; the shards are on `device`.
    Parameters in `whole` stay as they are, on each rank.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bfloat16 else {}
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)  # the root has no float inputs
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": set(whole)}
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fill(module)
            fully_shard(module, **settings)
    fill(root)
    fully_shard(root, **settings)


class CoordinatedSource(WeightSource):
    """A source that is read by all ranks together: each contributes its shards."""

    def __init__(self, module: nn.Module, wire_dtype: str, coordinator: Coordinator) -> None:
        """See WeightSource."""
        super().__init__(module, wire_dtype)
        self._coordinator = coordinator

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._coordinator.together("gather"):
            yield from super().__iter__()


def source_of(config: RunConfig, master: nn.Module, coordinator: Coordinator) -> WeightSource:
    """What a run publishes: an adapter's matrices, or all weights."""
    if config.trainer.adapter:
        base = cast(Any, master).base  # of trainer/adapter.py's Adapter
        return AdapterSource(master, config.model.dtype, config.trainer.lora.scaling, base)
    return CoordinatedSource(master, config.model.dtype, coordinator)
