"""Which hypotheses the audit tells apart in a bfloat16 engine: `python -m bench.audit_stories RUN`.

RUN is a finished run that kept its rollouts and versions (`make demo ARGS="audit.keep_versions=true"`). Its prompts are
served again by a vLLM on CPU that commits its versions one after the other while sequences run: once as it is, and once
with each fault planted. What was recorded is audited through the engine's kernels, and by each hypothesis over again.
Prints a Markdown table; each fault has a process and a folder of its own under `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.faulty_engine import Fault, FaultyEngine, late_tags, shared_prefix, torn_swap
from inflight.audit import AuditReport
from inflight.config import RunConfig, load
from inflight.generator.engine_args import CPU_WORKER, engine_values
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader

LAYER = 15
BLOCK = 32
"""Tokens in a block of the KV cache: prompts must fill some for a prefix hit."""
RUNNING = 12
FAULTS: dict[str, tuple[str, Callable[[FaultyEngine], Fault]]] = {
    "none": (f"early,late,old,prefix,head,layer.{LAYER}", lambda engine: contextlib.nullcontext()),
    "tags a step late": ("early", late_tags),
    "torn swap: a layer stays old": (f"layer.{LAYER}", lambda engine: torn_swap(engine, f"layers.{LAYER}.")),
    "stale lm_head": ("head", lambda engine: torn_swap(engine, "lm_head")),
    "prefix hit across versions": ("prefix", shared_prefix),
}
"""Fault → the hypotheses to test, and how it is planted."""


def main() -> None:
    """Each fault in a process of its own, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/audit_stories"))
    parser.add_argument("--prompts", type=int, default=24, help="each is sampled twice")
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--fault", choices=FAULTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fault is not None:
        _one(arguments)
        return
    print("| planted | alike | hypothesis | slope | |\n|---|---|---|---|---|", flush=True)
    for fault in FAULTS:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "bench.audit_stories", *sys.argv[1:], "--fault", fault], check=True)
        print(f"{fault}: {time.perf_counter() - started:.0f} s", file=sys.stderr)


def _one(arguments: argparse.Namespace) -> None:
    hypotheses, plant = FAULTS[arguments.fault]
    engine = _engine(load(arguments.run), arguments.run, arguments.out / arguments.fault.replace(" ", "-"))
    requests = _requests(arguments.run, arguments.prompts, engine.config.rollout.max_tokens)
    steps = -(-len(requests) // RUNNING) * engine.config.rollout.max_tokens
    with plant(engine):
        outputs = engine.serve(requests, every=max(1, steps // arguments.versions))
    engine.close()
    report = engine.audit_through_engine(outputs, hypotheses)
    for line in _lines(arguments.fault, report):
        print(line, flush=True)


def _engine(config: RunConfig, run: Path, folder: Path) -> FaultyEngine:
    """An engine as the run's, with its versions."""
    shutil.rmtree(folder, ignore_errors=True)
    extra = {"block_size": BLOCK, "gpu_memory_utilization": 0.1}
    generator = replace(config.generator, max_num_seqs=RUNNING, extra=extra)
    config = replace(config, run_dir=str(folder), generator=generator)
    arguments: dict[str, Any] = {**engine_values(config, "g0", CPU_WORKER), "additional_config": {"inflight": {}}}

    def weights(version: int) -> dict[str, torch.Tensor]:
        """As the run's trainer published them."""
        return load_file(run / "versions" / f"{version:06d}.safetensors")

    return FaultyEngine(config, arguments, weights)


def _requests(run: Path, prompts: int, tokens: int) -> list[tuple[list[int], int]]:
    """The run's first prompts, all of them once and then all of them again, so that prefixes are found."""
    found = {tuple(group.rollouts[0].prompt_ids): None for group in Reader(run / ROLLOUTS_FILE)}
    first = [list(prompt) for prompt in list(found)[:prompts]]
    # Of different lengths, so that swaps and prefills do not fall together.
    return [(prompt, tokens - 5 * (number % 4)) for number, prompt in enumerate(first * 2)]


def _lines(fault: str, report: AuditReport) -> list[str]:
    assert report.total is not None
    assert report.total.same is not None
    alike = f"{report.total.same.share:.1%} of {report.total.tokens}"
    lines = []
    for hypothesis in report.hypotheses:
        decided = sum(each.verdict is hypothesis.overall.verdict for each in hypothesis.by_version.values())
        slope = f"{hypothesis.overall.slope:+.3f} ± {hypothesis.overall.error:.3f}"
        verdict = f"{hypothesis.overall.verdict} ({decided} of {len(hypothesis.by_version)} versions by themselves)"
        lines.append(f"| {fault} | {alike} | `{hypothesis.name}` | {slope} | {verdict} |")
    outcome = "passed" if report.passed else f"{len(report.faults)} faults, first: {report.faults[0]}"
    return [*lines, f"| {fault} | {alike} | | | {report.swaps} swaps in sequences; audit {outcome} |"]


if __name__ == "__main__":
    main()
