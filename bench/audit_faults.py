"""Which planted faults the audit finds: `python -m bench.audit_faults` prints the table of docs/audit.md.

A real vLLM on CPU serves the tiny model while versions are committed, once for each dtype: soundly, with each fault of
an engine planted, and SOUND times more with other prompts. Faults of a record are planted in copies of what the sound
engine recorded. Each is audited by both judges, on the first 8, 20 and 60 prompts, two rollouts each. Versions are a
random walk whose step is about half of bfloat16's last place. Three processes for each dtype; what they made stays
under `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.faulty_engine import Fault, FaultyEngine, late_tags, rollout_of, shared_prefix, torn_swap, write_run
from bench.planted import RECORDED, Groups, unprocessed
from inflight.audit.alternatives import STANDARD
from inflight.audit.command import judge
from inflight.audit.record import read
from inflight.audit.replay import KeptVersions, Replayer, Sequenced, Stale, TransformersReplayer
from inflight.audit.report import AuditOutcome
from inflight.config import AuditConfig, GeneratorConfig, ModelConfig, RolloutConfig, RunConfig, Sampling, TaskConfig
from inflight.generator.engine_args import CPU_WORKER, engine_values
from inflight.models import prepare
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader

DTYPES = ("float32", "bfloat16")
JUDGES = ("transformers", "engine")
PROMPTS = (8, 20, 60)
SOUND = 10
SOUND_PROMPTS = 20
TOKENS = 24
BLOCK = 32
EVERY = 16
"""Most tokens of a rollout, tokens of a KV block, and steps from version to version."""
STEP = 0.003
TEMPERATURE = 0.7
NONE = "nothing"
OTHER_TEMPERATURE = "temperature 1 recorded where 0.7 ran"
ENGINE: dict[str, Callable[[FaultyEngine], Fault]] = {
    NONE: lambda engine: contextlib.nullcontext(),
    "tags a step late, all rollouts": late_tags,
    "torn swap: a layer stays old": lambda engine: torn_swap(engine, "layers.1."),
    "stale output layer": lambda engine: torn_swap(engine, "lm_head"),
    "stale prefix: hits across versions": shared_prefix,
}
SHOWN = {AuditOutcome.PASSED: "passed", AuditOutcome.FAILED: "**found**", AuditOutcome.NOT_SHOWN: "not shown"}


def main() -> None:
    """Each stage in a process of its own, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/audit_faults"))
    parser.add_argument("--stage", choices=("serve", *JUDGES), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=DTYPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.stage is not None:
        (_serve if arguments.stage == "serve" else _judge)(out / arguments.dtype, arguments.dtype, arguments.stage)
        return
    for dtype in DTYPES:
        shutil.rmtree(out / dtype, ignore_errors=True)
        for stage in ("serve", *JUDGES):
            started = time.perf_counter()
            command = [sys.executable, "-m", "bench.audit_faults", "--out", str(out), "--stage", stage]
            subprocess.run([*command, "--dtype", dtype], check=True)
            print(f"{dtype}, {stage}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(
        table(
            {
                (dtype, judge): json.loads((out / dtype / f"{judge}.json").read_text())
                for dtype in DTYPES
                for judge in JUDGES
            }
        )
    )


def table(found: dict[tuple[str, str], dict[str, list[str]]]) -> str:
    """Markdown: a row a fault, a column for each dtype and judge, with the verdicts of 8, 20 and 60 prompts in it."""
    columns = list(found)
    head = [f"{dtype}, {'through the engine' if judge == 'engine' else judge}" for dtype, judge in columns]
    lines = [f"| planted | {' | '.join(head)} |", "|---" * (1 + len(columns)) + "|"]
    for fault in found[columns[0]]:
        cells = []
        for column in columns:
            verdicts = found[column][fault]
            cells.append(verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts))
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _serve(folder: Path, dtype: str, stage: str) -> None:
    """The engine's part: a run folder for each fault, and for each of the sound runs."""
    config = _config(folder / "engine", dtype)
    states = [load_file(prepare("tiny") / "model.safetensors")]

    def weights(version: int) -> dict[str, torch.Tensor]:
        """A random walk."""
        while len(states) <= version:
            noise = torch.Generator().manual_seed(len(states))
            moved = states[-1].items()
            states.append({name: each + STEP * torch.randn(each.shape, generator=noise) for name, each in moved})
        return {name: each.to(getattr(torch, dtype)) for name, each in states[version].items()}

    arguments: dict[str, Any] = {**engine_values(config, "g0", CPU_WORKER), "additional_config": {"inflight": {}}}
    engine = FaultyEngine(config, arguments, weights)
    runs = {name: (fault, _requests(0, PROMPTS[-1])) for name, fault in ENGINE.items()}
    runs |= {f"sound {seed}": (ENGINE[NONE], _requests(seed, SOUND_PROMPTS)) for seed in range(1, SOUND + 1)}
    for name, (fault, requests) in runs.items():
        outputs = engine.serve_with(fault(engine), requests, EVERY)
        rollouts = sorted((rollout_of(output) for output in outputs), key=lambda each: _number(each.rollout_id))
        half = len(rollouts) // 2
        groups = [[rollouts[at], rollouts[at + half]] for at in range(half)]
        _write(folder, config, name, groups)
        print(f"{dtype}: {name}, version {engine.version}", file=sys.stderr)
    engine.close()


def _number(rollout_id: str) -> int:
    return int(rollout_id.rpartition("-")[2])


def _requests(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Each prompt twice, the second time when all were sent once, so that its prefix is found in the cache."""
    source = random.Random(seed)
    prompts = [[source.randrange(3, 17) for _ in range(BLOCK + 2 + number % 7)] for number in range(count)]
    return [(prompt, TOKENS - 5 * (number % 3)) for number, prompt in enumerate(prompts * 2)]


def _config(folder: Path, dtype: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name=str(prepare("tiny")), dtype=dtype),
        task=TaskConfig(name="addition"),
        run_dir=str(folder),
        generator=GeneratorConfig(
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_gib=0.0625,
            extra={"block_size": BLOCK, "gpu_memory_utilization": 0.05},
        ),
        rollout=RolloutConfig(temperature=TEMPERATURE, group_size=2),
        audit=AuditConfig(keep_versions=True),
    )


def _write(folder: Path, config: RunConfig, name: str, groups: Groups) -> Path:
    """A run folder of these groups beside the engine's, whose versions it shares."""
    path = _folder(folder, name)
    write_run(replace(config, run_dir=str(path)), groups)
    with contextlib.suppress(FileExistsError):
        (path / "versions").symlink_to(folder / "engine" / "versions")
    return path


class _Remembering(Replayer):
    """Replays each sequence once, however many records hold it."""

    def __init__(self, inner: Replayer) -> None:
        self._inner = inner
        self.sampling = inner.sampling
        self.rounds_alike = inner.rounds_alike
        self.same = inner.same
        self._known: dict[object, list[float]] = {}

    def replay(self, sequences: Sequence[Sequenced], stale: Stale | None = None) -> list[list[float]]:
        keys = [_key(sequence, stale) for sequence in sequences]
        fresh = {key: each for key, each in zip(keys, sequences, strict=True) if key not in self._known}
        self._known.update(zip(fresh, self._inner.replay(list(fresh.values()), stale), strict=True))
        return [self._known[key] for key in keys]

    def retrace(self, sequences: Sequence[Sequenced], recorded: Sequence[Sequence[float]]) -> list[list[float] | None]:
        return self._inner.retrace(sequences, recorded)

    def _use(self, state: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def _advance(self, jobs: list[Any], version: int) -> None:
        raise NotImplementedError


def _key(sequence: Sequenced, stale: Stale | None) -> object:
    tokens, passes, _ = sequence
    older = stale and (stale.pattern, tuple(stale.previous.get(each.version) for each in passes))
    return tuple(tokens), tuple(passes), older


def _judge(folder: Path, dtype: str, stage: str) -> None:
    """What one judge says of everything."""
    config = _config(folder / "engine", dtype)
    kept = KeptVersions(folder / "engine" / "versions")
    model = prepare("tiny")
    sampling = Sampling.of(config.rollout)
    sound = _groups(folder, NONE)
    plain = TransformersReplayer(model, kept, replace(sampling, temperature=1.0))
    replayer: Replayer = TransformersReplayer(model, kept, sampling)
    at_one = unprocessed(sound, replayer.replay, plain.replay)
    if stage == "engine":
        from inflight.audit.engine import EngineReplayer

        lengths = [len(rollout.prompt_ids) + len(rollout.turn.token_ids) for group in sound for rollout in group]
        replayer = EngineReplayer(model, kept, sampling, config, lengths=lengths)
    replayer = _Remembering(replayer)
    hypotheses = STANDARD if stage == "transformers" and dtype == "bfloat16" else ()

    def verdict(groups: Groups, count: int, change: Callable[[Groups], Groups] = list) -> str:
        path = _write(folder, config, f"{stage} judges", groups[:count])
        run = replace(config, run_dir=str(path))
        if change is not list:
            counted = (path / "metrics.jsonl").read_bytes()
            write_run(run, change(groups[:count]))
            (path / "metrics.jsonl").write_bytes(counted)
        record = read(path / ROLLOUTS_FILE, None)
        replays = "float32" if stage == "transformers" else dtype
        passes = {"dtype": replays, "recorded_in": run.model.dtype}
        return SHOWN[judge(path, run, record, replayer, kept, **passes, alternatives=hypotheses).outcome]

    found = {fault: [verdict(_groups(folder, fault), count) for count in PROMPTS] for fault in ENGINE}
    found |= {fault: [verdict(sound, count, change) for count in PROMPTS] for fault, change in RECORDED.items()}
    found[OTHER_TEMPERATURE] = [verdict(at_one, count) for count in PROMPTS]
    runs = [verdict(_groups(folder, f"sound {number}"), SOUND_PROMPTS) for number in range(1, SOUND + 1)]
    found[f"nothing, {SOUND} other runs of {SOUND_PROMPTS} prompts"] = [
        ", ".join(f"{runs.count(each)} {each}" for each in dict.fromkeys(runs))
    ]
    (folder / f"{stage}.json").write_text(json.dumps(found))


def _groups(folder: Path, name: str) -> Groups:
    path = _folder(folder, name) / ROLLOUTS_FILE
    return [list(group.rollouts) for group in Reader(path)]


def _folder(folder: Path, name: str) -> Path:
    return folder / "-".join(re.findall(r"[a-z0-9]+", name))


if __name__ == "__main__":
    main()
