"""Generators of one run that get the weights in different ways: CUDA IPC beside the trainer, NCCL as between hosts.

Each generator comes by `inflight join`, with the GPUs and the variables of a host of its own. The tokens of each are
checked by the audit, whose float32 verdict fails for a swap that is wrong anywhere. The gaps at the swaps are printed
(`-s`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inflight.metrics import SUMMARY_FILE, SWAPS_FILE, read_lines
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

ROOT = Path(__file__).parents[2]
KEY = "k" * 43
RUN_S = 280.0
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""NCCL between two of these processes takes sockets, as between hosts without a fabric."""
NO_TF32 = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton's kernels multiply float32 as such, so that the audit can judge single tokens."""
MACHINE = "gpu"


def gpu(number: int) -> str:
    """The name of a GPU that this process may use, for CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[number]


def host(name: str, number: int) -> dict[str, str]:
    """The environment of a process that sees one GPU and is on a host of its own, as far as NCCL can tell."""
    seen = {"CUDA_VISIBLE_DEVICES": gpu(number), "NCCL_HOSTID": name, **APART}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "INFLIGHT_JOIN_KEY": KEY, **NO_TF32, **seen}


class Fleet:
    """A launched run on GPU 0 with two generators that join, g0 on GPU 0 and g1 on GPU 1."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder / "run"
        self._logs = {name: folder / f"{name}.log" for name in ("launch", "g0", "g1")}
        self._processes = {
            "launch": self._start(
                "launch",
                0,
                "-m",
                "inflight.launcher",
                "--config-name",
                "tiny",
                f"machine={MACHINE}",
                f"run_dir={self.folder}",
                "network.bind=127.0.0.1",
                "hosts.starter=join",
                "generator.count=2",
                "generator.start_timeout_s=250",
                "publish.join_timeout_s=250",
                "launch.line_every_s=5",
                "+generator.extra.attention_backend=TRITON_ATTN",
                *overrides,
            )
        }

    def join(self, name: str, number: int) -> None:
        """Another generator, on a GPU; those of lower numbers have been placed."""
        self._processes[name] = self._start(name, number, "-m", "inflight.cli", "join", "127.0.0.1", "--wait", "200")

    def placed(self, name: str) -> None:
        """Returns when the launcher has placed the generator of this name where it joined."""
        self._until(lambda: f"{name} runs here" in self.log(name), f"{name} is not placed")

    def finish(self) -> None:
        """Returns when the run has ended, with exit code 0."""
        self._until(lambda: self._processes["launch"].poll() is not None, "the run has not ended")
        assert self._processes["launch"].returncode == 0, self.log("launch")[-6000:]

    def end(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()

    def log(self, name: str) -> str:
        return self._logs[name].read_text(errors="replace")

    def _start(self, name: str, number: int, *arguments: str) -> subprocess.Popen[bytes]:
        with self._logs[name].open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, env=host(name, number)
            )

    def _until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + RUN_S
        while not there():
            ended = [name for name, process in self._processes.items() if process.poll()]
            if ended or time.monotonic() > deadline:
                pytest.fail("\n".join([what, *(self.log(each)[-4000:] for each in self._processes)]))
            time.sleep(0.2)


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.end()


@pytest.mark.parametrize(
    ("transport", "ways"),
    [("nccl", {"g0": "nccl", "g1": "nccl"}), ("auto", {"g0": "ipc", "g1": "nccl"})],
    ids=["nccl", "mixed"],
)
def test_tokens_of_generators_on_other_hosts_are_those_of_their_versions(
    tmp_path: Path, fleets: list[Fleet], transport: str, ways: dict[str, str]
) -> None:
    fleet = Fleet(tmp_path, f"publish.transport={transport}", "trainer.steps=20")
    fleets.append(fleet)
    for number, name in enumerate(ways):
        fleet.join(name, number)
        fleet.placed(name)
    fleet.finish()
    trainer = (fleet.folder / "logs" / "trainer.log").read_text(errors="replace")
    for name, way in ways.items():
        assert f"weights go to {name} over {way}" in trainer, trainer[-4000:]
    groups = Reader(fleet.folder / ROLLOUTS_FILE)
    tokens: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            tokens[rollout.generator] += len(rollout.turn.token_ids)
            changes[rollout.generator] += len(rollout.turn.token_versions) - 1
    assert set(tokens) == set(ways)
    assert all(changes[name] > 0 for name in ways), "no sequence lived through a swap"
    summary = json.loads((fleet.folder / SUMMARY_FILE).read_text())
    swaps = read_lines(fleet.folder / SWAPS_FILE)
    for name, way in ways.items():
        committed = [line for line in swaps if line["generator"] == name and line["event"] == "committed"]
        took = sorted(1e3 * line["transfer_s"] for line in committed)
        gaps = sorted(1e3 * line["gap_s"] for line in committed)
        print(
            json.dumps(
                {
                    "generator": name,
                    "transport": way,
                    "tokens": tokens[name],
                    "changes within sequences": changes[name],
                    "swaps": len(took),
                    "transfer_ms": took[len(took) // 2],
                    "gap_ms": [gaps[len(gaps) // 2], gaps[-1]],
                }
            )
        )
    assert summary["aborted"] == 0
    command = [sys.executable, "-m", "inflight.cli", "audit", str(fleet.folder), "--limit", "60", "--no-tf32"]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=host("audit", 1), check=False)
    print(audit.stdout)
    assert audit.returncode == 0, audit.stdout + audit.stderr
