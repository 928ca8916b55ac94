"""An engine in a process of its own that does what a list of actions says, and prints the outcome of each as JSON.

    python -m tests.gpu.engine_process '{"model": DIR, "worker": ..., "engine": {...}, "actions": [{"do": "generate"}]}'

One process an engine: a fresh one is the reference that a swapped one is compared with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
PREFIX = "RESULT "


class Actions:
    """One method an action; each returns what is to be printed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        from inflight.generator.settings import Settings

        started = time.perf_counter()
        settings = Settings(swap=spec.get("swap", "auto"), adapters=spec.get("adapters", []))
        self.llm = LLM(
            spec["model"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,
            seed=0,
            worker_cls=spec.get("worker", "tests.gpu.storm_worker.StormWorker"),
            additional_config=settings.as_additional_config(),
            **spec.get("engine", {}),
        )
        self.engine = self.llm.llm_engine
        self.start_s = time.perf_counter() - started
        self._round = 0

    def start(self) -> float:
        return self.start_s

    def generate(self, tokens: int = 32, batch: int = 8, lora: tuple[int, str] | None = None) -> list[list[int]]:
        return self._generate(tokens, batch, [lora])

    def generate_mixed(self, lora: tuple[int, str], tokens: int = 32, batch: int = 8) -> list[list[int]]:
        """Each prompt twice in one batch: with the adapter, and of the base."""
        return self._generate(tokens, batch, [lora, None])

    def _generate(self, tokens: int, batch: int, adapters: list[tuple[int, str] | None]) -> list[list[int]]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": [1, 2, 3, 4 + i]} for i in range(batch) for _ in adapters]
        requests = [_lora(each) for each in adapters] * batch
        outputs = self.llm.generate(
            prompts, parameters, use_tqdm=False, lora_request=requests if any(requests) else None
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stage(self, path: str, version: int, adapter: int = 0) -> float:
        started = time.perf_counter()
        self.llm.collective_rpc("stage_weights", args=(path, version, True, adapter) if adapter else (path, version))
        return time.perf_counter() - started

    def commit(self, version: int, adapter: int = 0) -> list[Any]:
        return self.engine.commit_weights(version, *([adapter] if adapter else []))

    def swap_by(self, way: str) -> None:
        self.llm.collective_rpc("swap_by", args=(way,))

    def timed_swaps(self, many: int = 5) -> list[float]:
        return [round(self.llm.collective_rpc("timed_swap")[0], 2) for _ in range(many)]

    def storm(self, batch: int, tokens: int, every: int = 0, version: int = 1000) -> dict[str, Any]:
        """Decodes with a commit of identical weights before every `every`-th step (0: none)."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._round += 1
        parameters = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        for i in range(batch):
            self.engine.add_request(f"{self._round}-{i}", {"prompt_token_ids": [1, 2, 3, 4 + i]}, parameters)
        made: dict[str, list[int]] = {}
        quiet, swapped, number = [], [], 0
        while self.engine.has_unfinished_requests():
            number += 1
            swap = every > 0 and number > 20 and number % every == 0
            started = time.perf_counter()
            if swap:
                self.llm.collective_rpc("restage", args=(version + number,))
                self.llm.collective_rpc("commit_weights", args=(version + number,))
            for output in self.engine.step():
                made.setdefault(output.request_id.partition("-")[2], []).extend(output.outputs[0].token_ids)
            (swapped if swap else quiet).append(1e3 * (time.perf_counter() - started))
        swaps = self.llm.collective_rpc("take_swaps")
        return {
            "tokens": [made[str(i)] for i in range(batch)],
            "quiet_ms": _spread(quiet[25:]),
            "swapped_ms": _spread(swapped),
            "waited_ms": _spread([1e3 * swap[0] for swap in swaps[0]]),
            "remap_ms": _spread([1e3 * swap[1] for swap in swaps[0]]),
        }

    def memory(self) -> list[str]:
        """What nvidia-smi says of the GPUs, and of the processes on them."""
        import subprocess

        queries = ["gpu=memory.used,memory.total,name,driver_version", "compute-apps=pid,used_memory"]
        commands = [["nvidia-smi", f"--query-{query}", "--format=csv,noheader"] for query in queries]
        return [f"this is {os.getpid()}"] + [
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() for command in commands
        ]


def _lora(adapter: tuple[int, str] | None) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {adapter[0]}", adapter[0], adapter[1]) if adapter else None


def _spread(values: list[float]) -> list[float]:
    if not values:
        return []
    ordered = sorted(values)
    picks = (0.5, 0.9, 0.99, 1.0)
    return [round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for share in picks]


def main() -> None:
    """Runs the actions of the specification in argv."""
    spec = json.loads(sys.argv[1])
    actions = Actions(spec)
    for action in spec["actions"]:
        arguments = {key: value for key, value in action.items() if key != "do"}
        try:
            result = {"do": action["do"], "result": getattr(actions, action["do"])(**arguments)}
        except Exception as error:  # noqa: BLE001 - the test judges
            result = {"do": action["do"], "error": f"{type(error).__name__}: {error}"}
        print(PREFIX + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
