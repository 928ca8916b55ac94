"""The trainer is killed or stopped in a phase of a version; real processes, sockets, gloo, a generator without vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import TrainerProcess, until

from inflight import config as configuration
from inflight.config import BusConfig, ModelConfig, PublishConfig, RunConfig, TaskConfig

pytestmark = pytest.mark.faults

RANK = str(Path(__file__).parent / "rank.py")


class Scene:
    """Trainers one after the other, and a generator that outlives them."""

    def __init__(self, folder: Path) -> None:
        self.config = RunConfig(
            model=ModelConfig("tiny", dtype="float32"),
            task=TaskConfig("addition"),
            run_dir=str(folder),
            bus=BusConfig(heartbeat_s=0.1, dead_after_s=2),
            publish=PublishConfig(bucket_bytes=1 << 18, transfer_timeout_s=5, commit_timeout_s=5),
        )
        configuration.save(self.config)
        (folder / "bus").mkdir()
        self.out = folder / "g0.out"
        self.processes: list[subprocess.Popen] = []

    def trainer(self, version: int) -> TrainerProcess:
        made = TrainerProcess(self.config, version, "gloo", dict(os.environ))
        self.processes.append(made.process)
        return made

    def generator(self, fault: str) -> None:
        with self.out.open("w") as out:
            command = [sys.executable, RANK, self.config.endpoint("weights"), "g0", "1", fault]
            self.rank = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.processes.append(self.rank)

    def begun(self, fault: str) -> tuple[TrainerProcess, str]:
        """A trainer that has committed version 1 and sends version 2, in which the generator does `fault` to it; and
        the digest of version 1."""
        trainer = self.trainer(0)
        self.generator(f"{fault}:{trainer.process.pid}")
        trainer.committed(g0=0)
        trainer.publish(1)
        trainer.committed(g0=1)
        _, odd = self.live()
        trainer.order("publish", version=2)
        return trainer, odd

    def live(self) -> tuple[int, str]:
        """The version that it holds, and a digest of all its bytes."""
        told = len(self.out.read_text().splitlines())
        os.kill(self.rank.pid, signal.SIGUSR1)

        def answers() -> list[str]:
            return [line for line in self.out.read_text().splitlines()[told:] if line.startswith("live ")]

        _, version, digest = until(answers, "its answer")[0].split()
        return int(version), digest

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(20)


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize(
    "phase, held", [("begin", 1), ("receive", 1), ("build", 1), ("ready", 1), ("swap", 2), ("answer", 2)]
)
def test_a_trainer_killed_in_a_phase_leaves_a_whole_version_and_its_successor_continues(scene, phase, held):
    """Until the engine gets the Commit the version before stays, from then on the new one is live; odd and even
    versions are two sets of weights."""
    trainer, odd = scene.begun(f"{phase}:kill")
    assert trainer.process.wait(60) == -signal.SIGKILL
    until(lambda: scene.live()[0] == held, f"version {held}")
    version, digest = scene.live()
    assert (version, digest == odd) == (held, held == 1)

    trainer = scene.trainer(held)
    trainer.committed(g0=held)
    assert scene.live() == (held, digest), "nothing is taken back either"
    trainer.publish(held + 1)
    trainer.committed(g0=held + 1)
    version, other = scene.live()
    assert (version, other == odd) == (held + 1, held == 2)
    assert scene.rank.poll() is None


@pytest.mark.parametrize(
    "phase, seconds, held", [("begin", 8, 1), ("receive", 3, 1), ("receive", 8, 1), ("ready", 8, 1), ("swap", 8, 2)]
)
def test_a_trainer_suspended_in_a_phase_leaves_a_whole_version_and_continues_when_resumed(scene, phase, seconds, held):
    """For less and for more than the transfer may take; the generator never holds a mixture, and nothing is started
    again."""
    trainer, odd = scene.begun(f"{phase}:stop")
    until(lambda: not trainer.runs, "its stop")
    until(lambda: scene.live()[0] == held, f"version {held}")
    version, digest = scene.live()
    assert digest == odd or version == 2
    time.sleep(seconds)
    assert scene.live() == (held, digest)
    trainer.resume()
    trainer.answered("publish")
    trainer.committed(g0=2)
    version, digest = scene.live()
    assert (version, digest == odd) == (2, False)
    trainer.publish(3)
    trainer.committed(g0=3)
    assert scene.live() == (3, odd)
    assert scene.rank.poll() is None
