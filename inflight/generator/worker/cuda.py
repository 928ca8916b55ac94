"""The worker that vLLM is told to use on CUDA: `worker_cls="inflight.generator.worker.cuda.InflightCUDAWorker"`.

Beside what the mixin does, it moves the parameters into an arena while the model is loaded (before anything is compiled
or captured), tells vLLM's memory planning about the second set of weights, and hooks the head of the forward pass, so
that a remap happens when the next step's inputs are already prepared. Where both sets can have CUDA graphs of their
own, vLLM captures twice instead. The receiver starts when warm-up is over: CUDA graph capture tolerates no other
thread's work.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.v1.worker.gpu_worker import Worker

from inflight.generator import hooks
from inflight.generator.settings import Settings
from inflight.generator.shadow import arena as arenas
from inflight.generator.shadow.base import CudaShadow
from inflight.generator.shadow.copy import CopyShadow
from inflight.generator.shadow.cuda_plan import PlanError
from inflight.generator.shadow.graphs import GRAPHS_BYTES, GraphSetsShadow, HalfCaptured
from inflight.generator.shadow.layout import Layout, lay_out, move_into
from inflight.generator.shadow.limits import refuse
from inflight.generator.shadow.remap import RemapShadow
from inflight.generator.worker.base import InflightWorkerMixin
from inflight.messages import Welcome
from inflight.weights.transport import make_receiver
from inflight.weights.transport.base import Receiver
from inflight.weights.transport.sums import warm_up

logger = logging.getLogger("vllm.inflight")

GIB = 2**30
MAPPED = ("graphs", "remap")
"""Ways to swap whose weights lie in memory that is mapped by ourselves."""
MARGIN_BYTES = 2 * GIB
"""Kept for activations and CUDA graphs when `auto` judges, before they are known, whether a second set fits."""
CAPTURE_TIMEOUT_S = 300.0
"""How much longer one rank may take to capture its graphs than another."""
LOAD_TIMEOUT_S = 1800.0
"""How much longer one rank may take to load its weights than another. One that fails meanwhile ends the engine."""


class InflightCUDAWorker(InflightWorkerMixin, Worker):
    """vLLM's CUDA worker with its weights in an arena and a shadow beside it."""

    inflight_shadow: CudaShadow
    graphs_shadow: type[GraphSetsShadow] = GraphSetsShadow
    remap_shadow: type[RemapShadow] = RemapShadow
    copy_shadow: type[CopyShadow] = CopyShadow

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads as vLLM does, then moves the parameters into the arena and makes the shadow."""
        hooks.require("cuda")
        refuse(self.vllm_config, "CUDA")
        Worker.load_model(self, *args, **kwargs)
        self.inflight_shadow = self.make_shadow()

    def make_shadow(self) -> CudaShadow:
        """The shadow that `swap` asks for. Raises ValueError with one line when the memory does not do."""
        model = self.model_runner.get_model()
        layout = lay_out(model)
        asked = Settings.of(self.vllm_config).swap
        mode, why = self._choose(asked, layout.nbytes)
        free_before, _ = torch.cuda.mem_get_info(self.device)
        shadow = self._build_shadow(mode, layout, model)
        shadow.plan_graphs(self.model_runner)
        self._account(mode, layout.nbytes)
        free, _ = torch.cuda.mem_get_info(self.device)
        logger.info(
            "inflight: swap %s (%s), %d parameters in %.2f GiB, second set %s, device memory %.2f GiB more than before",
            mode, why, len(layout.regions), layout.nbytes / GIB,
            "in pinned host memory" if mode == "host" else "on the device", (free_before - free) / GIB,
        )  # fmt: skip
        return shadow

    def _build_shadow(self, mode: str, layout: Layout, model: torch.nn.Module) -> CudaShadow:
        whole = self.parallel_config.pipeline_parallel_size == 1
        if mode in MAPPED:
            arena = arenas.Arena(layout.nbytes, self.device)
            move_into(layout, arena.live)
            if mode == "remap":
                return self.remap_shadow(arena, layout, model.load_weights, whole=whole)
            required = Settings.of(self.vllm_config).swap == mode
            return self.graphs_shadow(
                arena, layout, model.load_weights, whole=whole, any_rank=self._any_rank, required=required
            )
        live = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self.device)
        move_into(layout, live)
        return self.copy_shadow(live, layout, model.load_weights, whole=whole, host=mode == "host")

    def _choose(self, asked: str, nbytes: int) -> tuple[str, str]:
        """(mode, reason). Raises ValueError when what is asked for can't be had."""
        mappable = arenas.supported(self.device)
        lacking = self._lacking(nbytes)
        if asked in MAPPED and not mappable:
            raise ValueError(
                f"generator.swap={asked}: {self.device} has no virtual memory management; use copy or host"
            )
        short = lacking + (GRAPHS_BYTES if asked in ("graphs", "auto") else 0)
        if asked in ("graphs", "remap", "copy") and short > 0:
            raise ValueError(self._lack(asked, nbytes, short))
        if asked != "auto":
            return asked, "asked for"
        # All ranks capture twice or none does; in the other ways each swaps for itself.
        if not self._any_rank(short > 0 or not mappable, LOAD_TIMEOUT_S):
            return "graphs", "auto"
        if lacking > 0:
            return "host", f"a second set on the device lacks {lacking / GIB:.2f} GiB"
        if not mappable:
            return "copy", "no virtual memory management"
        return "remap", f"graphs lack {short / GIB:.2f} GiB" if short > 0 else "another rank can't have graphs"

    def _lacking(self, nbytes: int) -> int:
        """Bytes that a second set lacks beside the smallest useful KV cache; zero or less: it fits."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if asked_kv := self.cache_config.kv_cache_memory_bytes:
            return nbytes + asked_kv + MARGIN_BYTES - free
        used = self.init_snapshot.free_memory - free
        return used + nbytes + self._smallest_kv() + MARGIN_BYTES - self.requested_memory

    @staticmethod
    def _any_rank(bad: bool, timeout_s: float = CAPTURE_TIMEOUT_S) -> bool:
        """Whether it is so on any rank of this engine: each rank asks at the same place. Raises RuntimeError when one
        has not asked in time."""
        flag = torch.tensor([int(bad)])
        maximum = torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(flag, maximum, get_world_group().cpu_group, async_op=True)
        work.wait(timedelta(seconds=timeout_s))
        return bool(flag)

    def _smallest_kv(self) -> int:
        specs = self.get_kv_cache_spec().values()
        return sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)

    @staticmethod
    def _lack(mode: str, nbytes: int, lacking: int) -> str:
        graphs = f" with CUDA graphs of {GRAPHS_BYTES / GIB:.2f} GiB" if mode == "graphs" else ""
        others = "swap=remap (no second graphs), swap=host" if mode == "graphs" else "swap=host"
        return (
            f"generator.swap={mode} keeps a second set of {nbytes / GIB:.2f} GiB{graphs} on the device and lacks "
            f"{lacking / GIB:.2f} GiB beside the KV cache: use {others}, a smaller KV cache or a smaller max_model_len"
        )

    def _account(self, mode: str, nbytes: int) -> None:
        """Tells vLLM's memory planning what it can't see.

        Its KV cache gets: asked for - weights (`model_memory_usage`) - torch's peak - growth outside of torch. The
        arena is outside of torch, both sets of it, so the weights must not be counted again; a second buffer from
        torch must be added.
        """
        runner = self.model_runner
        if mode in MAPPED:
            runner.model_memory_usage = max(0, int(runner.model_memory_usage) - nbytes)
        elif mode == "copy":
            runner.model_memory_usage = int(runner.model_memory_usage) + nbytes

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """As vLLM's, with the second set counted. Raises ValueError when what is left holds no sequence."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        available = super().determine_available_memory()
        measured = torch.cuda.max_memory_allocated(self.device) - before
        shadow = self.inflight_shadow
        need = self._smallest_kv()
        if available < need and shadow.target().is_cuda:
            raise ValueError(self._lack(shadow.name, shadow.live.numel(), need - available))
        # With a KV cache of a fixed size vLLM does not say.
        shadow.measured(int(getattr(self, "peak_activation_memory", measured)))
        return available

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's; then a remap moves to the head of the forward pass and the receiver starts."""
        try:
            times = super().compile_or_warm_up_model()
        except HalfCaptured as error:
            self._end_if_waited_for(error)
            raise
        self.inflight_shadow = self.inflight_shadow.ready(self.model_runner)
        settings = Settings.of(self.vllm_config)
        if settings.endpoint:
            self.inflight_receiver = self._start_receiver(settings)
        return times

    @staticmethod
    def _end_if_waited_for(error: Exception) -> None:
        """Ends this process where other ranks wait for it in a collective of vLLM's, which has no bound: they answer
        first, and the engine reads answers in order. It ends itself when a rank's process does."""
        if get_world_group().world_size > 1:
            logger.critical("inflight: this rank ends: %s", error)
            os._exit(1)

    def connect(self, welcome: Welcome) -> Receiver:
        """The transport, made to fill the shadow without a buffer between. The plan is made, what verifies is compiled
        and NCCL is loaded now, not at the first version. What can't be made is told to the publisher then, as its
        failure."""
        try:
            self.inflight_shadow.agree(welcome.manifest)
        except PlanError as error:
            logger.error("inflight: %s", error)
        if welcome.manifest.checksum == "sum64":
            warm_up(self.device)
        if welcome.transport == "nccl":
            # As make_receiver does: an absent NCCL does no harm.
            from inflight.weights.transport.communicator import load_kernels

            load_kernels(self.device, welcome.timeout_s)
        return self.inflight_shadow.accept(make_receiver(welcome))

    def commit_weights(self, version: int) -> dict[str, Any]:
        """As the mixin's. A remap is done after the answer, at the next forward pass, so `gap_s` is at least that of
        the last one that was done; `copy` and `host` stand still on the device alone, which is not measured here."""
        answer = super().commit_weights(version)
        if "error" in answer:
            return answer
        return {"gap_s": max(answer["gap_s"], self.inflight_shadow.last_gap_s)}
