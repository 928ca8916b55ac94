"""The bench as a whole: one generator, the arms one after the other, their evaluation."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import DictConfig

from bench.peers.arm import Outcome, Shared, run_arm
from bench.peers.control import SOCKET, Caller
from bench.peers.figures import figures_of
from bench.peers.held_out import HeldOut
from bench.peers.processes import Actor, Process, make_folder
from bench.peers.ways import ANSWER_S, WAYS, FileTransfer, NcclTransfer, synchronous
from inflight.bus import Listener
from inflight.config import RunConfig
from inflight.launcher.compose import compose
from inflight.metrics import METRICS_FILE, read_lines
from inflight.models import prepare
from inflight.prompts import ModelTokens
from inflight.surroundings import computing
from inflight.trainer.policy import load_policy
from inflight.weights.publish.publisher import Publisher
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.source import WeightSource


class Bench:
    """Used as a context manager; leaving it ends the generator and the actors."""

    def __init__(self, config: DictConfig) -> None:
        """Loads the model while the generator starts. Raises RuntimeError when that does not come up."""
        self._config = config
        # A short path, for the sockets in it.
        self._folder = Path(tempfile.mkdtemp(prefix="peers-"))
        self._run = self._compose("generator", config.seeds[0], [])
        make_folder(self._run)
        control = self._folder / "control"
        self._actors: list[Actor] = []
        self._start_rewards: dict[int, float] = {}
        self._generator = Process(
            ["-m", "bench.peers.generator", "--run-dir", self._run.run_dir, "--name", "g0"],
            Path(config.out) / "generator.log",
            {
                **computing(self._run.generator.threads),
                "CUDA_VISIBLE_DEVICES": str(config.generator_devices),
                SOCKET: str(control),
            },
        )
        try:
            self._shared = self._share(control)
        except BaseException:
            self._generator.end()
            raise

    def _share(self, control: Path) -> Shared:
        config = self._config
        run = self._run
        torch.set_num_threads(run.trainer.threads)
        accelerator = Accelerator(cpu=config.device == "cpu")
        policy = load_policy(prepare(run.model.name), bfloat16=run.trainer.autocast, device=accelerator.device)
        source = WeightSource(policy.master, run.model.dtype)
        self._tokens = ModelTokens(run.model.name)
        fence = ReadFence(source.device)
        self._listener = Listener(run.endpoint("weights"), run.bus)
        publisher = Publisher(
            source, self._listener, run.publish, version=0, ranks={"g0": 1}, fence=fence, routes_file=run.routes_file
        )
        self._wait_joined(publisher, config.start_s)
        caller = Caller(control, ANSWER_S)
        native = config.device == "cuda"
        transfer = NcclTransfer(source, caller) if native else FileTransfer(source, caller, self._folder)
        start = {name: parameter.detach().clone() for name, parameter in policy.master.named_parameters()}
        return Shared(policy, source, fence, publisher, accelerator, caller, transfer, start)

    def _wait_joined(self, publisher: Publisher, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not publisher.committed:
            self._generator.require()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the generator was not up within start_s={timeout_s:g}")
            time.sleep(0.2)

    def _compose(self, folder: str, seed: int, overrides: Sequence[str]) -> RunConfig:
        config = self._config
        given = [*config.common, *overrides, f"seed={seed}", f"run_dir={self._folder / folder}"]
        return compose(config.base, given)

    def prepare(self, name: str, seed: int, *, warm: bool = False) -> Actor:
        """Starts the actor of an arm; it waits for the arm to begin."""
        folder = "warm" if warm else f"{name}-{seed}"
        config = self._compose(folder, seed, self._config.in_flight)
        actor = Actor(synchronous(config) if WAYS[name].synchronous else config)
        self._actors.append(actor)
        return actor

    def train(self, name: str, actor: Actor, seconds: float) -> Outcome:
        """One arm's training."""
        self._generator.require()
        return run_arm(self._shared, WAYS[name], actor, seconds=seconds, every_s=self._config.snapshot_s)

    def evaluate(self, name: str, seed: int, outcome: Outcome, config: RunConfig) -> dict[str, Any]:
        """The arm's figures, with the held-out rewards of the weights that it kept."""
        questions = HeldOut(config, self._tokens)
        url = self._shared.publisher.served["g0"].url
        delivered = questions.ask(url, outcome.live)
        if seed not in self._start_rewards:
            self._start_rewards[seed] = questions.ask(url, self._shared.publish(self._shared.start)).reward
        curve = [(0.0, self._start_rewards[seed])]
        answers = delivered
        for at, weights in outcome.snapshots:
            answers = questions.ask(url, self._shared.publish({**self._shared.start, **weights}))
            curve.append((at, answers.reward))
        pairs = list(zip(delivered.token_ids, answers.token_ids, strict=True))
        lines = read_lines(outcome.folder / METRICS_FILE)
        shutil.copy(outcome.folder / METRICS_FILE, Path(self._config.out) / f"{name}-{seed}.jsonl")
        return {
            "arm": name,
            "seed": seed,
            **figures_of(lines, outcome.seconds, outcome.activity),
            "publish_ms": 1e3 * statistics.median(outcome.blocked_s) if outcome.blocked_s else 0.0,
            "publish_ms_each": [round(1e3 * each, 2) for each in outcome.blocked_s],
            "calls_ms": {name: round(1e3 * statistics.median(each), 2) for name, each in outcome.calls_s.items()},
            "held_out": curve,
            # The last weights as the arm's way has delivered them, against inflight's transfer of the same ones.
            "delivered_reward": delivered.reward,
            "delivered_equal_share": sum(a == b for a, b in pairs) / len(pairs),
            "rewards": [line["reward"] for line in lines],
        }

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            actor.close()
        self._shared.publisher.finish("the bench is over")
        self._generator.wait(5.0)
        self._generator.end()
        self._shared.publisher.close()
        self._listener.close()
        self._shared.caller.close()
        shutil.rmtree(self._folder, ignore_errors=True)
