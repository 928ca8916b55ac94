"""The trainer's side of vLLM's own transfer of weights over NCCL, as vLLM 0.26 and vLLM 0.33 want it called.

Until 0.26 each update says whether it is packed; 0.33 fixes that when the communicator forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol

import torch

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""The parameters' names and values, the same ones in the same order by each call."""


class NativeSender(Protocol):
    """A communicator with the ranks of one engine."""

    def send(self, *, packed: bool) -> None:
        """Broadcasts the present weights; the engine must be in `update_weights` at the same time."""


def form(port: int, ranks: int, weights: Weights, *, packed: bool) -> NativeSender:
    """Waits until the ranks form the communicator with this process; `worker_info` is what they need for it."""
    where = _where(port, ranks)
    return _ByEngine(where, weights, packed=packed) if fixed_at_start() else _ByCall(where, weights)


def fixed_at_start() -> bool:
    """Whether all updates of a communicator are packed or none."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return not hasattr(NCCLWeightTransferEngine, "trainer_init")


def worker_info(port: int, ranks: int, *, packed: bool) -> dict[str, Any]:
    """The argument of the workers' `init_weight_transfer_engine`."""
    info = {**_where(port, ranks), "rank_offset": 1}
    return {**info, "packed": packed} if fixed_at_start() else info


def update_info(parameters: dict[str, Any], *, packed: bool) -> dict[str, Any]:
    """The argument of the workers' `update_weights`: `parameters` are names, dtype_names and shapes."""
    return parameters if fixed_at_start() else {**parameters, "packed": packed}


def _where(port: int, ranks: int) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + ranks}


class _ByCall:
    """vLLM 0.26."""

    def __init__(self, where: dict[str, Any], weights: Weights) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        engine: Any = NCCLWeightTransferEngine  # mypy sees the one that is installed
        self._engine = engine
        self._weights = weights
        self._group = engine.trainer_init(where)

    def send(self, *, packed: bool) -> None:
        self._engine.trainer_send_weights(self._weights(), {"group": self._group, "packed": packed})


class _Elsewhere:
    """In the place of vLLM's client: the bench itself makes the engine's calls."""

    def init_weight_transfer_engine(self, payload: dict[str, Any]) -> None:
        """Nothing."""

    def start_weight_update(self) -> None:
        """Nothing."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Nothing."""

    def finish_weight_update(self) -> None:
        """Nothing."""


class _ByEngine:
    """vLLM 0.33."""

    def __init__(self, where: dict[str, Any], weights: Weights, *, packed: bool) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        info = NCCLTrainerInitInfo(**where, packed=packed, rank=0)
        source = _source_of(weights)
        self._packed = packed
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_Elsewhere(), source=source)

    def send(self, *, packed: bool) -> None:
        if packed != self._packed:
            raise ValueError(f"the communicator was formed with packed={self._packed}, the update wants {packed}")
        self._engine.send_weights()


def _source_of(weights: Weights) -> Any:
    """What `weights` gives as vLLM's WeightSource, without a copy."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    def metadata(_: Any) -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]

    body = {"metadata": cached_property(metadata), "iter_full": lambda _: weights()}
    return type("Source", (WeightSource,), body)()
