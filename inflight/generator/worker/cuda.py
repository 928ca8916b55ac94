"""The CUDA worker: `worker_cls="inflight.generator.worker.cuda.InflightCUDAWorker"`.

In addition to the mixin, it moves the parameters into an arena while the model is loaded (before anything is compiled
or captured), accounts for the second set of weights in vLLM's memory planning, and hooks the start of the forward pass,
so that a remap happens when the next step's inputs are already prepared. Where both sets can have CUDA graphs of their
own, vLLM captures twice instead. The receiver starts after warm-up: during CUDA graph capture no other thread may use
the device.
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
from inflight.weights.transport.base import Receiver
from inflight.weights.transport.sums import warm_up

logger = logging.getLogger("vllm.inflight")

GIB = 2**30
MAPPED = ("graphs", "remap")
"""Ways to swap that keep the weights in virtual memory mapped by inflight."""
MARGIN_BYTES = 2 * GIB
"""Reserved for activations and CUDA graphs, whose size is unknown when `auto` decides whether a second set fits."""
CAPTURE_TIMEOUT_S = 300.0
"""Seconds for which ranks wait for each other in graph capture."""
LOAD_TIMEOUT_S = 1800.0
"""Seconds for which ranks wait for each other in loading. A rank that fails meanwhile ends the engine."""


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
        """The shadow for the configured `swap`. Raises ValueError with one line when memory is too short."""
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
            mode,
            why,
            len(layout.regions),
            layout.nbytes / GIB,
            "in pinned host memory" if mode == "host" else "on the device",
            (free_before - free) / GIB,
        )
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
        """(mode, reason). Raises ValueError when the requested mode is not possible."""
        mappable = arenas.supported(self.device)
        missing = self._shortfall(nbytes)
        if asked in MAPPED and not mappable:
            raise ValueError(
                f"generator.swap={asked}: {self.device} has no virtual memory management; use copy or host"
            )
        short = missing + (GRAPHS_BYTES if asked in ("graphs", "auto") else 0)
        if asked in ("graphs", "remap", "copy") and short > 0:
            raise ValueError(self._too_large(asked, nbytes, short))
        if asked != "auto":
            return asked, "as configured"
        # All ranks capture twice or none does; the other modes are chosen per rank.
        if not self._any_rank(short > 0 or not mappable, LOAD_TIMEOUT_S):
            return "graphs", "auto"
        if missing > 0:
            return "host", f"a second set on the device is short of {missing / GIB:.2f} GiB"
        if not mappable:
            return "copy", "no virtual memory management"
        return "remap", f"graphs are short of {short / GIB:.2f} GiB" if short > 0 else "another rank can't have graphs"

    def _shortfall(self, nbytes: int) -> int:
        """Bytes by which a second set and the smallest useful KV cache exceed the memory; zero or less: they fit."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if asked_kv := self.cache_config.kv_cache_memory_bytes:
            return nbytes + asked_kv + MARGIN_BYTES - free
        used = self.init_snapshot.free_memory - free
        return used + nbytes + self._smallest_kv() + MARGIN_BYTES - self.requested_memory

    @staticmethod
    def _any_rank(bad: bool, timeout_s: float = CAPTURE_TIMEOUT_S) -> bool:
        """Whether `bad` holds on any rank of this engine; a collective over all its ranks. Raises RuntimeError when a
        rank has not joined in time."""
        flag = torch.tensor([int(bad)])
        maximum = torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(flag, maximum, get_world_group().cpu_group, async_op=True)
        work.wait(timedelta(seconds=timeout_s))
        return bool(flag)

    def _smallest_kv(self) -> int:
        specs = self.get_kv_cache_spec().values()
        return sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)

    @staticmethod
    def _too_large(mode: str, nbytes: int, missing: int) -> str:
        graphs = f" with CUDA graphs of {GRAPHS_BYTES / GIB:.2f} GiB" if mode == "graphs" else ""
        others = "swap=remap (no second graphs), swap=host" if mode == "graphs" else "swap=host"
        return (
            f"generator.swap={mode} keeps a second set of {nbytes / GIB:.2f} GiB{graphs} on the device and is short of "
            f"{missing / GIB:.2f} GiB beside the KV cache: use {others}, a smaller KV cache or a smaller max_model_len"
        )

    def _account(self, mode: str, nbytes: int) -> None:
        """Corrects vLLM's memory planning for memory that it does not see.

        The size of its KV cache is: requested memory - weights (`model_memory_usage`) - torch's peak - growth outside
        of torch. The arena, both sets of it, counts as growth outside of torch, so the weights must not be counted
        again; a second buffer allocated by torch must be added.
        """
        runner = self.model_runner
        if mode in MAPPED:
            runner.model_memory_usage = max(0, int(runner.model_memory_usage) - nbytes)
        elif mode == "copy":
            runner.model_memory_usage = int(runner.model_memory_usage) + nbytes

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """As vLLM's, including the second set. Raises ValueError when the rest is too small for one sequence."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        available = super().determine_available_memory()
        measured = torch.cuda.max_memory_allocated(self.device) - before
        shadow = self.inflight_shadow
        need = self._smallest_kv()
        if available < need and shadow.target().is_cuda:
            raise ValueError(self._too_large(shadow.name, shadow.live.numel(), need - available))
        # With a KV cache of a fixed size vLLM does not report the peak.
        shadow.measured(int(getattr(self, "peak_activation_memory", measured)))
        return available

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's; afterwards a remap moves to the start of the forward pass, and the receiver starts."""
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
        """Ends this process if other ranks wait for it in a collective of vLLM's, which has no timeout: the engine
        reads answers in rank order and would wait for theirs. It does end when the process of a rank ends."""
        if get_world_group().world_size > 1:
            logger.critical("inflight: this rank ends: %s", error)
            os._exit(1)

    def connect(self, welcome: Welcome) -> Receiver:
        """The transport, which fills the shadow directly where it can. The plan is made, the checksum kernel compiled
        and NCCL loaded now, not at the first version. A plan that cannot be made is logged here and reported to the
        publisher at the first version, as a failure."""
        try:
            self.inflight_shadow.agree(welcome.manifest)
        except PlanError as error:
            logger.error("inflight: %s", error)
        prepare(welcome, self.device)
        return self.inflight_shadow.accept(super().connect(welcome))

    def commit_weights(self, version: int) -> dict[str, Any]:
        """As the mixin's. A remap is done after the answer, at the next forward pass, so `gap_s` is at least that of
        the last remap; `copy` and `host` stall only the device, which is not measured here."""
        answer = super().commit_weights(version)
        if "error" in answer:
            return answer
        return {"gap_s": max(answer["gap_s"], self.inflight_shadow.last_gap_s)}


def prepare(welcome: Welcome, device: torch.device) -> None:
    """Compiles what verifies, and loads NCCL, where a publisher's versions will need them: now, not at the first."""
    if welcome.manifest.checksum == "sum64":
        warm_up(device)
    if welcome.transport == "nccl":
        # As in make_receiver: NCCL that is not installed raises nothing here.
        from inflight.weights.transport.communicator import load_kernels

        load_kernels(device, welcome.timeout_s)
