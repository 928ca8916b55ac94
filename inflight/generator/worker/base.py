"""What a vLLM worker needs to hold a shadow beside its live weights, on CPU and CUDA.

The swap is a collective RPC, and an RPC can only run between two forward passes: the engine core issues steps and RPCs
from one thread, into one first-in-first-out queue to each worker process (MultiprocExecutor's broadcast queue, whose
messages the worker's loop runs one after the other) or, without worker processes, as plain calls (UniProcExecutor).
`execute_model` and `sample_tokens` of one step are queued together, so nothing runs between them. All ranks thus swap
at the same step boundary, without a collective.

`additional_config["inflight"]` of the engine (see `Settings`) says where the publisher listens. Without an `endpoint`
the worker takes weights from files only (`stage_weights`), which is what offline use, tests and benches do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.error_line import with_kind
from inflight.generator.plugin import INCARNATION
from inflight.generator.settings import Settings
from inflight.generator.worker.staging import Staging
from inflight.weights.receive.shadow import Shadow, SwapRefused

if TYPE_CHECKING:
    from inflight.messages import Welcome
    from inflight.weights.receive.receiver import WeightReceiver
    from inflight.weights.transport.base import Receiver


logger = logging.getLogger("vllm.inflight")


class InflightWorkerMixin:
    """The part that the CPU and the CUDA worker share: shadow, receiver, and the RPCs that stage and swap.

    A worker class puts it before vLLM's own worker and implements `make_shadow`.
    """

    inflight_shadow: Shadow
    inflight_receiver: WeightReceiver | None = None
    if TYPE_CHECKING:  # attributes that vLLM's Worker provides
        vllm_config: Any
        rank: int
        model_runner: Any
        device: Any

    def make_shadow(self) -> Shadow:
        """Makes the shadow of the model that was just loaded. Raises ValueError with one line when it cannot."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads as vLLM does, then makes the shadow and starts listening for versions."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        settings = Settings.of(self.vllm_config)
        self.inflight_shadow = self.make_shadow()
        if settings.endpoint:
            self.inflight_receiver = self._start_receiver(settings)

    def _start_receiver(self, settings: Settings) -> WeightReceiver:
        # Imported here, so that offline use needs neither sockets nor a transport.
        from inflight.bus import Link
        from inflight.messages import RankHello
        from inflight.weights.receive.receiver import WeightReceiver
        from inflight.weights.transport.place import place_of

        link = Link(settings.endpoint, f"{settings.generator}.r{self.rank}", settings.bus)
        hello = RankHello(
            generator=settings.generator,
            rank=self.rank,
            world_size=self.vllm_config.parallel_config.world_size,
            incarnation=os.environ.get(INCARNATION, ""),
            place=place_of(self.device),
        )
        receiver = WeightReceiver(link, self.inflight_shadow, hello, connect=self.connect)
        receiver.start()
        return receiver

    def connect(self, welcome: Welcome) -> Receiver:
        """This rank's side of the transport that the publisher names."""
        from inflight.weights.transport import make_receiver

        return make_receiver(welcome, Settings.of(self.vllm_config).network)

    def commit_weights(self, version: int) -> dict[str, Any]:
        """RPC: makes `version` live. Returns `gap_s`, the seconds for which this rank's step loop stalled, or `error`,
        the reason why the version is not live.

        Never raises: vLLM reads the answers of all ranks in order and stops at the first that failed, and would take
        the remaining answers for those of the next call.
        """
        return self._answer(version, lambda: self._swap(version))

    def _answer(self, version: int, swap: Callable[[], None]) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            swap()
        except Exception as error:
            logger.exception("inflight: version %d is not committed on rank %d", version, self.rank)
            return {"error": with_kind(error)}
        return {"gap_s": time.perf_counter() - started}

    def _swap(self, version: int) -> None:
        """Raises SwapRefused when not exactly this version is ready, and whatever a failing swap raises."""
        if self.inflight_receiver is not None:
            self.inflight_receiver.swap(version)
            return
        self._staging.swap(version, self.rank)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.inflight_shadow)

    @property
    def inflight_staged(self) -> int | None:
        """The version that `stage_weights` has built and that is not committed yet."""
        return self._staging.version

    def stage_weights(self, path: str, version: int, wait: bool = True) -> None:
        """RPC: builds `version` in the shadow from a safetensors file, the way received bytes are built.

        With `wait=False` it returns at once and building continues beside decoding; `staged_version` tells when it is
        done. Raises what building raises (with `wait=False`, `staged_version` does); the live weights are untouched.
        """
        self._require_files()
        self._staging.stage(Path(path), version, wait=wait)

    def staged_version(self) -> int | None:
        """RPC: the staged version; None while it is being built. Raises what building raised."""
        return self._staging.staged()

    def _require_files(self) -> None:
        if self.inflight_receiver is not None:
            raise SwapRefused("this worker takes its weights from the publisher, not from files")

    def shutdown(self) -> None:
        """Stops listening, then shuts down as vLLM does."""
        if self.inflight_receiver is not None:
            self.inflight_receiver.close()
        super().shutdown()  # type: ignore[misc]
