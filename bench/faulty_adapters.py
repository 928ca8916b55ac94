"""A real vLLM, in this process, whose LoRA adapters change while requests run, and in which faults can be planted.

Faults of a worker are planted in all of its ranks by RPC, so an engine of several ranks can have them too; those of the
scheduler are in this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from bench.faulty_engine import Fault, FaultyEngine, rollout_of, write_run
from inflight.audit import AuditReport, run
from inflight.config import RunConfig
from inflight.generator.settings import FIRST_ADAPTER, Settings

POLICY = FIRST_ADAPTER
OTHER = FIRST_ADAPTER + 1
COMPANY_TOKENS = 24
OTHER_EVERY = 3
"""The other adapter gets a version with every third of the policy's."""
_OTHER_SEED = 1 << 20


class FaultyAdapters(FaultyEngine):
    """Its requests are those of the adapter `policy`, for which a version comes every few steps. Beside them run
    requests of the base, of the adapter `other`, which has versions of its own, and of adapters that vLLM loads from a
    disk into three slots; of four it has to evict some."""

    def __init__(
        self,
        config: RunConfig,
        arguments: dict[str, Any],
        matrices: Callable[[int], dict[str, torch.Tensor]],
        own: Sequence[Path],
    ) -> None:
        """`matrices(seed)` are an adapter's by their names in a PEFT checkpoint, those of seed 0 without effect. `own`
        are PEFT directories of adapters that vLLM loads."""
        settings = Settings(adapters=["policy", "other"]).as_additional_config()
        lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16, "additional_config": settings}
        super().__init__(config, {**arguments, **lora}, matrices)
        self.lora_request = request("policy", POLICY)
        self.others = replace(config, run_dir=f"{config.run_dir}-other")
        """The run of the other adapter's versions and rollouts."""
        self.other_version = 0
        self.others.version_file(0).parent.mkdir(parents=True)
        save_file(matrices(0), self.others.version_file(0))
        self._own = own
        self.company: dict[str, list[Any]] = {}
        """What the last `serve` gave to the requests beside its own, by `base`, `other` and `own`."""

    @property
    def exact(self) -> bool:
        """Whether rounding is so small that an audit can pass and single tokens are judged."""
        return self.config.model.dtype == "float32"

    def commit(self) -> None:
        super().commit()
        if self.version % OTHER_EVERY == 0:
            self.other_version += 1
            path = self.others.version_file(self.other_version)
            save_file(self._weights(_OTHER_SEED + self.other_version), path)
            self._swap(path, self.other_version, OTHER)

    def _swap(self, path: Path, version: int, *adapter: int) -> None:
        super()._swap(path, version, *(adapter or (POLICY,)))

    def serve(self, requests: Sequence[tuple[list[int], int]], every: int) -> list[Any]:
        self._add_company([prompt for prompt, _ in requests[:2]])
        made = super().serve(requests, every)
        self.company = _by_kind(made)
        return self.company.pop("policy")

    def company_alone(self, prompts: Sequence[list[int]]) -> dict[str, list[Any]]:
        """What requests of the base and of vLLM's own adapters get while no version comes."""
        self._batches += 1
        self._add_company(prompts)
        made: list[Any] = []
        while self.llm.has_unfinished_requests():
            made += [output for output in self.llm.step() if output.finished]
        return _by_kind(made)

    def _add_company(self, prompts: Sequence[list[int]]) -> None:
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=COMPANY_TOKENS, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
        sampled = greedy.clone()
        sampled.temperature = self.config.rollout.temperature
        asked = {"base": None, "other": request("other", OTHER)}
        asked |= {f"own{n}": request(f"own{n}", n, str(path)) for n, path in enumerate(self._own, start=1)}
        for number, prompt in enumerate(prompts):
            for name, lora in asked.items():
                sampling = sampled if name == "other" else greedy
                self.llm.add_request(
                    f"{name}-{self._batches}-{number}", {"prompt_token_ids": prompt}, sampling, lora_request=lora
                )

    def audit_other(self, **options: Any) -> AuditReport:
        """Audits what the last `serve` gave to the other adapter's requests."""
        rollouts = [rollout_of(output) for output in self.company["other"]]
        write_run(self.others, [rollouts])
        return run(self.others.path, **options)


def _by_kind(outputs: Sequence[Any]) -> dict[str, list[Any]]:
    """Outputs by what their requests are of, in the order in which they were added."""
    found: dict[str, list[Any]] = {"policy": [], "base": [], "other": [], "own": []}
    for output in sorted(outputs, key=lambda each: [int(part) for part in each.request_id.split("-")[1:3]]):
        kind = output.request_id.partition("-")[0].rstrip("0123456789")
        found[kind if kind in found else "policy"].append(output)
    return found


def request(name: str, adapter: int, path: str = "inflight://") -> Any:
    """vLLM's name for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, adapter, path)


Planted = Callable[[Any], Fault]
"""A fault of a worker: for as long as the context lasts, that worker has it."""


@contextlib.contextmanager
def planted(engine: FaultyAdapters, fault: Planted) -> Iterator[None]:
    """All ranks' workers have the fault."""
    engine.llm.collective_rpc(_plant, args=(fault,))
    try:
        yield
    finally:
        engine.llm.collective_rpc(_heal)


def _plant(wrapper: Any, fault: Planted) -> None:
    wrapper.inflight_fault = stack = contextlib.ExitStack()
    stack.enter_context(fault(getattr(wrapper, "worker", wrapper)))


def _heal(wrapper: Any) -> None:
    wrapper.inflight_fault.close()


@contextlib.contextmanager
def foreign_slot(worker: Any) -> Iterator[None]:
    """The policy's requests are given the slot of the other adapter, and the other's the policy's."""
    manager = worker.model_runner.lora_manager._adapter_manager
    whole = manager._set_adapter_mapping
    table = manager.lora_index_to_id

    def cross() -> None:
        first = table.index(POLICY)
        second = table.index(OTHER)
        table[first], table[second] = table[second], table[first]

    def crossed(mapping: Any) -> None:
        cross()
        try:
            whole(mapping)
        finally:
            cross()

    with mock.patch.object(manager, "_set_adapter_mapping", crossed):
        yield


@contextlib.contextmanager
def live_slot(worker: Any) -> Iterator[None]:
    """A version is written into the slot that computes."""
    shadow = worker.inflight_shadow
    whole = shadow._write

    def write(slot: int) -> None:
        whole(next(each for each in shadow._copies if each != slot))

    with mock.patch.object(shadow, "_write", write):
        yield


@contextlib.contextmanager
def stale_slot(worker: Any) -> Iterator[None]:
    """The last rank omits every second swap: its slices of the adapter are of the version before."""
    shadow = worker.inflight_shadow
    omitted = [False]
    whole = shadow.swap

    def swap() -> float:
        omitted[0] = not omitted[0]
        if omitted[0]:
            shadow.discard()
            return 0.0
        seconds: float = whole()
        return seconds

    last = worker.rank == worker.vllm_config.parallel_config.world_size - 1
    with mock.patch.object(shadow, "swap", swap) if last else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def wrong_lineage(engine: FaultyAdapters) -> Iterator[None]:
    """The policy's requests are stamped with the other adapter's versions."""
    scheduler = engine.core.scheduler
    stamp = scheduler.set_weight_version

    def crossed(version: int, adapter: int = 0) -> None:
        if adapter == OTHER:
            stamp(version, POLICY)
            stamp(version, OTHER)

    with mock.patch.object(scheduler, "set_weight_version", crossed):
        yield
