"""The trainer's main over the real bus and transport; the generator and the actor are played here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import re
import signal
import threading
import time

import msgspec
import pytest
import torch
from fake_generator import FakeGenerator, eventually
from rollout_samples import make_config, make_rollout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight.bus import Link, Listener, Received
from inflight.config import (
    AuditConfig,
    GateConfig,
    ModelConfig,
    ObjectiveConfig,
    PublishConfig,
    TrainerConfig,
    save,
)
from inflight.exits import DATA_ENDED, STOPPED, say_why
from inflight.groups import LARGEST
from inflight.messages import ActorHello, Finish, Grant, GroupDone, Status
from inflight.metrics import METRICS_FILE, SWAPS_FILE, read_lines
from inflight.report import summary
from inflight.rollout.buffer import ROLLOUTS_FILE, Buffer, DataEnded
from inflight.rollout.restore import newest_version
from inflight.rollout.rules import drop_members
from inflight.rollout.stream import Reader
from inflight.trainer import loop
from inflight.trainer.__main__ import main
from inflight.trainer.checkpoint import index, io, rewind, snapshot
from inflight.trainer.learner import Learner, Stopped
from inflight.trainer.report import Reporter
from inflight.types import RolloutGroup


class FakeActor:
    """Delivers what it is granted, sampled under the version that the generator holds; no rollout equals another."""

    started = staticmethod(itertools.count(1.0).__next__)
    lengths = (5, 5)
    """Tokens of the members of a group."""

    def __init__(self, config, generator, poisoned=frozenset()):
        self.config, self.generator, self.poisoned = config, generator, poisoned
        self.finish: Finish | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while self.generator.version is None and not self._closing.wait(0.01):
            pass  # an actor asks those in the routes alone: they have a version
        with Link(self.config.endpoint("rollouts"), "a0", self.config.bus) as link:
            link.send(ActorHello(actor="a0", incarnation="0" * 16))
            while not self._closing.is_set():
                message = link.receive(0.05)
                if isinstance(message, Finish):
                    self.finish = message
                    self.kept = [each.name for each in (self.config.path / "checkpoints").glob("step-*")]
                elif isinstance(message, Grant):
                    for index in message.questions:
                        link.send(GroupDone(group=self._group(f"q{index}")))

    def _group(self, name):
        source, version = random.Random(name), self.generator.version
        unit, logprob = (LARGEST, -20.0) if name in self.poisoned else (1.0, -2.5)
        members = [
            msgspec.structs.replace(
                make_rollout(
                    name,
                    index,
                    spans=((0, version),),
                    length=length,
                    reward=index * unit,
                    token_ids=[source.randrange(17) for _ in range(length)],
                    logprobs=[logprob] * length,
                ),
                started=self.started(),
            )
            for index, length in enumerate(self.lengths)
        ]
        return RolloutGroup(group_id=name, prompt_key=name, rollouts=members)

    def close(self):
        self._closing.set()
        self._thread.join(5)


def trained(run):
    """The questions of every step, as metrics.jsonl tells them."""
    return [index for line in run.lines() for index in line["questions"]]


class Run:
    """A run's folder and everyone but the trainer."""

    def __init__(self, folder, **trainer):
        settings = {"steps": 4, "groups_per_step": 2, "micro_batch": 2, "learning_rate": 1e-3, "batch_timeout_s": 30.0}
        settings["compare_start"] = "off"  # a played generator computes nothing, unless it has a server
        self.config = dataclasses.replace(
            make_config(folder, keep=True),
            model=ModelConfig(name="tiny", dtype="bfloat16"),
            trainer=TrainerConfig(**(settings | trainer)),
            publish=PublishConfig(
                transport="gloo", join_timeout_s=30.0, transfer_timeout_s=10.0, commit_timeout_s=10.0
            ),
            audit=AuditConfig(keep_versions=True),
        )
        self.save()
        (folder / "bus").mkdir()
        self.folder = folder
        self.statuses: list[Status] = []
        self.launcher = Listener(self.config.endpoint("status"), self.config.bus)
        self.poisoned = frozenset()
        """Groups whose numbers each can be trained on by itself, and whose gradient under `ppo` float32 can't hold."""
        self.generator: FakeGenerator | None = None
        self.actor: FakeActor | None = None
        self.others: list[FakeGenerator] = []

    def save(self):
        save(self.config)

    def start(self, *, actor=True, server=None):
        """`server`: a ModelServer that answers for the generator."""
        url = server.url if server else "http://127.0.0.1:1"
        self.generator = FakeGenerator(self.config.endpoint("weights"), url=url).start()
        if server:
            server.generator = self.generator
        if actor:
            self.actor = FakeActor(self.config, self.generator, self.poisoned)
        return self

    def lines(self):
        return read_lines(self.folder / METRICS_FILE)

    def read_statuses(self):
        while (event := self.launcher.receive(0.0)) is not None:
            if isinstance(event, Received):
                self.statuses.append(event.message)
        return self.statuses

    def close(self):
        for each in (self.actor, self.generator, *self.others, self.launcher):
            if each is not None:
                each.close()

    @contextlib.contextmanager
    def beside(self, action):
        """Runs `action` in a thread."""
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        yield
        thread.join(60)


@pytest.fixture
def make_run(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    runs = []

    def make(**trainer):
        runs.append(Run(tmp_path, **trainer))
        return runs[-1]

    yield make
    signal.signal(signal.SIGTERM, before)
    for run in runs:
        run.close()


def train(run) -> int:
    return main(["--run-dir", str(run.folder)])


@contextlib.contextmanager
def after(condition, action):
    """While the block runs: `action` in a thread once `condition()` holds. Where it never does, the action ends the
    block all the same, and the test fails."""
    came = threading.Event()
    over = threading.Event()

    def holds():
        if condition():
            came.set()
        return came.is_set() or over.is_set()

    def wait():
        with contextlib.suppress(AssertionError):
            eventually(holds, timeout_s=60)
        if not over.is_set():
            action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert came.is_set(), "what the action was to follow has not happened"


def test_a_whole_run(make_run):
    run = make_run(checkpoint_every=3).start()
    assert train(run) == 0
    lines = run.lines()
    assert [(line["step"], line["version"]) for line in lines] == [(n, n) for n in (1, 2, 3, 4)]
    for line in lines:
        assert line["tokens_trained"] == 20
        assert line["tokens_masked"] == 0
        assert line["reward"] == 0.5
        assert line["reward_std"] == 0.5
        assert line["reward_all"] == 0.5
        assert line["grad_norm"] > 0
        assert sum(line["lag_counts"].values()) == 20
    wanted = (
        "time_s loss log_ratio_mean log_ratio_max clip_share lag_mean groups_dropped buffer wait_s train_s "
        "publish_wait_s pack_s guard_s committed swaps tokens_per_s"
    )
    assert set(wanted.split()) <= lines[-1].keys()
    figures = summary.summarize(run.folder)
    assert (figures.steps, figures.swaps_failed) == (4, 0)
    assert figures.swaps + figures.swaps_superseded == 5, "a busy machine may pass over a version"
    assert figures.swaps_while_running == figures.swaps >= 1
    for line in lines:  # a group may start before the commit of the last step
        assert line["lag_max"] <= run.config.gate.max_lag + 2 + figures.swaps_superseded
    assert run.actor.finish.reason == "all 4 steps are done"
    eventually(lambda: Finish(reason="all 4 steps are done") in run.generator.heard, "the engine hearing of the end")
    assert "step-000004" in run.actor.kept, "the result is kept before the others end"

    def told_of_the_end():
        last = run.read_statuses()[-1:]
        wanted = {"step": 4, "steps": 4, "phase": "done", "committed_g0": 4}
        return any(wanted.items() <= status.values.items() for status in last)

    eventually(told_of_the_end, "the last status")


def without_the_last(group):
    """A rule of the gate."""
    return drop_members(group, lambda member: member is group.rollouts[-1], "last")


def test_what_the_gate_does_is_counted_by_reason(make_run):
    run = make_run(steps=2)
    rules = [{"name": f"{__name__}:without_the_last"}]
    ratio_rules = [{"name": "token_ratio", "low": 1e3, "high": 1e9}]
    run.config = dataclasses.replace(
        run.config,
        rollout=dataclasses.replace(run.config.rollout, group_size=3),
        gate=GateConfig(rules=rules, ratio_rules=ratio_rules),
    )
    save(run.config)
    run.start(actor=False)
    run.actor = type("ThreeAnswers", (FakeActor,), {"lengths": (5, 5, 5)})(run.config, run.generator)
    assert train(run) == 0
    for step, line in enumerate(run.lines(), start=1):
        assert line["tokens_masked_by_ratio"] == {"token_ratio": 20}
        assert (line["tokens_trained"], line["tokens_masked"]) == (0, 20)
        assert line["rollouts_dropped"] == {"last": 2 * step}
    figures = summary.summarize(run.folder)
    assert (figures.tokens_trained, figures.tokens_masked) == (0, 40)
    assert figures.rollouts_dropped == {"last": 4}


def test_a_synchronous_run_trains_on_nothing_stale(make_run):
    run = make_run(steps=6)
    object.__setattr__(run.config.trainer, "synchronous", True)
    object.__setattr__(run.config.gate, "max_lag", 0)
    save(run.config)
    run.start()
    assert train(run) == 0
    assert [line["lag_counts"] for line in run.lines()] == [{"0": 20}] * 6


def test_kept_versions_are_the_bytes_that_were_published(make_run, tiny_model):
    run = make_run(steps=2).start()
    assert train(run) == 0
    assert sorted(p.name for p in (run.folder / "versions").iterdir()) == [f"{n:06d}.safetensors" for n in range(3)]
    kept, live = load_file(run.config.version_file(2)), run.generator.shadows[0].live
    assert kept.keys() == live.keys()
    assert all(torch.equal(kept[name], live[name]) for name in kept)
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).state_dict()
    first = load_file(run.config.version_file(0))
    assert all(torch.equal(first[name], start[name]) for name in first)
    assert any(not torch.equal(first[name], kept[name]) for name in first)


def test_the_order_of_things(make_run, monkeypatch):
    """A version is kept before it is published, the result before anyone is sent home."""
    run = make_run(steps=2)
    events = []
    from inflight.trainer import loop
    from inflight.weights.publish.publisher import Publisher

    keep, publish = loop.keep_version, Publisher.publish
    monkeypatch.setattr(loop, "keep_version", lambda s, v, path: (keep(s, v, path), events.append(("keep", v))))
    save, finish = loop.save_checkpoint, Buffer.finish
    monkeypatch.setattr(loop, "save_checkpoint", lambda *a: (save(*a), events.append("checkpoint")))
    monkeypatch.setattr(Buffer, "finish", lambda self, *a: (events.append("finish"), finish(self, *a))[1])
    monkeypatch.setattr(Publisher, "publish", lambda self, v: (events.append(("publish", v)), publish(self, v))[1])
    run.start()
    assert train(run) == 0
    steps = [("keep", 0), ("keep", 1), ("publish", 1), ("keep", 2), ("publish", 2)]
    assert events == [*steps, "checkpoint", "finish"]


def test_checkpoints_can_be_started_from(make_run):
    run = make_run(steps=3, checkpoint_every=1).start()
    assert train(run) == 0
    folders = sorted((run.folder / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000001", "step-000002", "step-000003"]
    model = AutoModelForCausalLM.from_pretrained(folders[-1])
    assert model.dtype == torch.float32
    kept = load_file(run.config.version_file(3))
    assert all(torch.equal(model.state_dict()[name].to(torch.bfloat16), tensor) for name, tensor in kept.items())
    assert AutoTokenizer.from_pretrained(folders[-1])("1+2=")["input_ids"]
    beside = [path.name for path in folders[-1].glob("*.safetensors")]
    assert beside == ["model.safetensors"], "an engine reads them all"
    moments = load_file(folders[-1] / "trainer" / "optimizer.safetensors")
    names = dict(model.named_parameters())
    assert {f"{name}.exp_avg_sq" for name in names} <= moments.keys()
    assert moments["model.norm.weight.step"] == 3


@dataclasses.dataclass
class Died(Exception):
    """As if by SIGKILL: nothing of the trainer runs after it."""


def go_on(run, *, server=None, **trainer):
    """The folder as the launcher would give it to the next start, after the others were started again."""
    for each in (run.actor, run.generator, run.launcher):
        each.close()
    time.sleep(1.2)  # a closed socket lingers for a second, under the name that the next one bears
    run.config = dataclasses.replace(
        run.config,
        resume=True,
        checkpoint=str(index.newest(run.folder) or ""),
        trainer=dataclasses.replace(run.config.trainer, **trainer),
    )
    save(run.config)
    run.launcher = Listener(run.config.endpoint("status"), run.config.bus)
    return run.start(server=server)


def test_a_version_is_published_after_all_updates_of_a_batch_and_a_run_resumes_with_them(make_run, monkeypatch):
    """The deal of the sequences is part of the random state: the end is that of a run that nothing has disturbed."""
    run = make_run(steps=4, checkpoint_every=2, updates_per_batch=2, epochs_per_batch=2, warmup_steps=8).start()
    with monkeypatch.context() as patched:
        kill_at(patched, loop.Trainer, "_write_line", lambda trainer, step, *_: step == 3)
        with pytest.raises(Died):
            train(run)
    first = load_file(run.config.version_file(3))
    go_on(run)
    learner = []
    monkeypatch.setattr(loop.Trainer, "run", noting(loop.Trainer.run, lambda t: learner.append(state_of(t._learner))))
    assert train(run) == 0
    assert learner == [{"step": 8, "lr": pytest.approx(1e-3 * 3 / 8)}]
    assert [(line["version"], line["updates"], len(line["by_update"])) for line in run.lines()] == [
        (version, 4, 4) for version in (1, 2, 3, 4)
    ]
    assert sorted(path.stem for path in (run.folder / "versions").iterdir()) == [f"{n:06d}" for n in range(5)]
    again = load_file(run.config.version_file(3))
    assert all(torch.equal(first[name], again[name]) for name in first), "step 3 was taken twice, and dealt out alike"


@pytest.mark.parametrize("dies_in", ["publish", "checkpoint", "line"])
def test_a_run_resumes_from_its_checkpoint(make_run, monkeypatch, dies_in):
    """Versions, optimizer, schedule and random numbers continue; no question is trained on twice or left out."""
    run = make_run(steps=6, checkpoint_every=2, warmup_steps=8).start()
    with monkeypatch.context() as patched:
        if dies_in == "publish":
            kill_at(patched, loop.Trainer, "publish", lambda trainer, version: version == 4)
        elif dies_in == "checkpoint":
            kill_at(patched, loop.Trainer, "checkpoint", lambda trainer: trainer.steps_done == 4)
        else:
            kill_at(patched, loop.Trainer, "_write_line", lambda trainer, step, *_: step == 4)
        with pytest.raises(Died):
            train(run)
    assert index.newest(run.folder).name == "step-000002"
    before = read_rollouts(run)
    go_on(run)
    learner = []
    monkeypatch.setattr(loop.Trainer, "run", noting(loop.Trainer.run, lambda t: learner.append(state_of(t._learner))))
    assert train(run) == 0
    (state,) = learner
    assert state["step"] == 2
    assert state["lr"] == pytest.approx(1e-3 * 3 / 8)
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4, 5, 6]
    assert [line["learning_rate"] for line in run.lines()] == pytest.approx([1e-3 * step / 8 for step in range(1, 7)])
    assert sorted(trained(run)) == list(range(12))
    times = [line["time_s"] for line in run.lines()]
    assert times == sorted(times)
    swaps = [line for line in read_lines(run.folder / SWAPS_FILE) if line["event"] == "committed"]
    assert [swap["version"] for swap in swaps] == [0, 1, 2, 3, 4, 5, 6]
    groups = read_rollouts(run)
    assert len({group.group_id for group in groups}) == len(groups)
    kept = {group.group_id: group for group in groups}
    for group in before:
        undone = newest_version(group) > 2
        assert (kept.get(group.group_id) == group) != undone, "a tag of an undone version would lie"
    saved = index.read(index.newest(run.folder))
    assert (saved.step, saved.books.settled_below, saved.books.trained) == (6, 12, 12)
    counts = summary.summarize(run.folder)
    assert (counts.steps, counts.version) == (6, 6)


def kill_at(patched, owner, name, when):
    original = getattr(owner, name)

    def killed(self, *arguments):
        if when(self, *arguments):
            raise Died
        return original(self, *arguments)

    patched.setattr(owner, name, killed)


def noting(function, note):
    def noted(self):
        note(self)
        return function(self)

    return noted


def state_of(learner):
    parameter = next(iter(learner.policy.master.parameters()))
    return {"step": float(learner.optimizer.state[parameter]["step"]), "lr": learner.optimizer.param_groups[0]["lr"]}


def read_rollouts(run):
    return list(Reader(run.folder / ROLLOUTS_FILE))


def test_stopping_within_a_step_leaves_its_groups_to_be_trained_on(make_run, monkeypatch):
    run = make_run(steps=5).start()

    def stop(self, batch, stopped):
        if self.optimizer.state:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped()
            self.policy.drop_gradients()
            raise Stopped
        return backward(self, batch, stopped)

    backward = Learner.backward
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "backward", stop)
        assert train(run) == STOPPED
    assert index.read(index.newest(run.folder)).books.trained == 2
    assert train(go_on(run)) == 0
    assert sorted(trained(run)) == list(range(10))


def test_without_a_checkpoint_it_restarts_with_the_sampled_groups(make_run, monkeypatch):
    run = make_run(steps=3).start()
    with monkeypatch.context() as patched:
        kill_at(patched, loop.Trainer, "publish", lambda trainer, version: version == 1)
        with pytest.raises(Died):
            train(run)
    before = read_rollouts(run)
    assert train(go_on(run)) == 0
    assert sorted(trained(run)) == list(range(6))
    assert read_rollouts(run)[: len(before)] == before


def test_a_finished_run_can_be_given_more_steps(make_run):
    run = make_run(steps=2).start()
    assert train(run) == 0
    assert train(go_on(run, steps=4, checkpoint_every=1, checkpoints_kept=1)) == 0
    assert sorted(trained(run)) == list(range(8))
    kept = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert kept == {"step-000002", "step-000004"}, "a generator that is started again begins with the first"


@pytest.mark.parametrize(("kept", "left"), [(0, {8, 9, 1_000_000}), (2, {9, 1_000_000}), (5, {8, 9, 1_000_000})])
def test_only_checkpoints_are_dropped_and_the_oldest_first(tmp_path, kept, left):
    steps = {8, 9, 1_000_000}
    others = {"step-000009-good", "step-000007.partial-x", "step-best"}  # a user's copies, a writer at work
    for name in [*map(index.name_of, steps), *others]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    io.drop_checkpoints(tmp_path / "checkpoints", kept)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*map(index.name_of, left), *others}
    assert index.newest(tmp_path).name == "step-1000000"


def test_a_damaged_checkpoint_is_one_line(make_run, capfd):
    run = make_run(steps=1).start()
    assert train(run) == 0
    file = run.folder / "checkpoints" / "step-000001" / "trainer" / "state.json"
    file.write_text(file.read_text()[:-9])
    assert train(go_on(run, steps=2)) == 1
    assert "step-000001/trainer/state.json can't be read" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("line", ["{", '{"step": null}', '{"step": "x"}'])
def test_a_damaged_line_of_metrics_is_named_and_stays(tmp_path, line):
    metrics = tmp_path / METRICS_FILE
    metrics.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=METRICS_FILE):
        rewind.rewind(make_config(tmp_path), 1)
    assert metrics.read_text() == f'{{"step": 1}}\n{line}\n'


def test_a_full_disk_leaves_the_last_checkpoint_whole(make_run, monkeypatch, capfd):
    """Written in part: the folder under its final name is the one before, and nothing else is left."""
    run = make_run(steps=4, checkpoint_every=1).start()
    real, calls = io.save_file, []

    def full(tensors, path, *rest, **kwargs):
        calls.append(path)
        if len(calls) > 2:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        return real(tensors, path, *rest, **kwargs)

    monkeypatch.setattr(io, "save_file", full)
    object.__setattr__(run.config.audit, "keep_versions", False)
    save(run.config)
    assert train(run) == 1
    assert "can't be written: I/O error: No space left" in capfd.readouterr().err.splitlines()[-1]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-000001"]
    assert index.read(run.folder / "checkpoints" / "step-000001").step == 1


def test_a_disk_too_full_for_a_version_is_one_line(make_run, monkeypatch, capfd):
    run = make_run(steps=4).start()
    real = io.save_file

    def full(tensors, path, *rest, **kwargs):
        real(tensors, path, *rest, **kwargs)
        if "2" in path.name:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(io, "save_file", full)
    assert train(run) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.endswith("000002.safetensors can't be written: I/O error: No space left on device (os error 28)")
    assert {path.name for path in (run.folder / "versions").iterdir()} == {"000000.safetensors", "000001.safetensors"}


def test_a_parameter_without_a_gradient_has_no_state_and_needs_none(tmp_path):
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model["used"](torch.ones(2)).sum().backward()
    optimizer.step()
    moments = snapshot.optimizer_tensors(model, optimizer)
    (tmp_path / "trainer").mkdir()
    save_file(moments, tmp_path / io.OPTIMIZER_FILE)
    restored = torch.optim.AdamW(model.parameters(), fused=True)
    io.load_optimizer(tmp_path, model, restored)
    assert {name for name, each in model.named_parameters() if each in restored.state} == {"used.weight", "used.bias"}
    save_file({name: each for name, each in moments.items() if name != "used.bias.step"}, tmp_path / io.OPTIMIZER_FILE)
    with pytest.raises(index.CheckpointError, match=r"has no state for used\.bias$"):
        io.load_optimizer(tmp_path, model, restored)


PPO = ObjectiveConfig(name="ppo")


@pytest.mark.parametrize(("poisoned", "done"), [({3}, 1), ({1}, 0)])
def test_a_batch_with_a_gradient_that_is_not_finite_is_skipped(make_run, poisoned, done):
    """Neither version nor optimizer nor learning rate moves; its questions are done with, others take their place."""
    run = make_run(steps=3, warmup_steps=8, checkpoint_every=1, objective=PPO)
    run.poisoned = {f"q{index}" for index in poisoned}
    run.start()
    assert train(run) == 0
    lines = run.lines()
    assert [(line["step"], line["version"]) for line in lines] == [(n, n) for n in (1, 2, 3)]
    batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [line["questions"] for line in lines] == batches[:done] + batches[done + 1 :]
    assert [line["updates_skipped"] for line in lines] == [int(n == done) for n in range(3)]
    dropped = {"gradient not finite": 2}
    named = {f"q{index}": "gradient not finite" for index in batches[done]}
    assert [line["dropped"] for line in lines] == [named if n == done else {} for n in range(3)]
    assert [line["groups_dropped"] for line in lines] == [dropped if n >= done else {} for n in range(3)]
    moments = load_file(index.newest(run.folder) / "trainer" / "optimizer.safetensors")
    assert moments["model.norm.weight.step"] == 3
    assert all(torch.isfinite(each).all() for each in moments.values())
    warned = lambda: any("norm is" in str(status.values.get("warnings")) for status in run.read_statuses())  # noqa: E731
    eventually(warned, "the warning")


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("begins_with", [0, 2])
def test_gradients_that_are_not_finite_end_the_run_and_are_not_met_again(make_run, capfd, begins_with, kept):
    """Nothing is mended between the two starts: the second has the same answers to the same questions. Whether a
    checkpoint of the last step was written before the batches came (`kept`) or not."""
    run = make_run(steps=4, max_skipped_updates=2, checkpoint_every=kept, objective=PPO)
    run.poisoned = {f"q{index}" for index in range(begins_with, begins_with + 4)}
    run.start()
    assert train(run) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r"norm is (inf|nan): 2 updates in a row .*\(trainer.max_skipped_updates=2\)$", said), said
    saved = index.read(index.newest(run.folder))
    assert (saved.step, saved.books.trained) == (begins_with // 2, begins_with)
    assert saved.books.dropped == {"gradient not finite": 4}
    assert saved.books.settled_below == begins_with + 4
    assert train(go_on(run)) == 0
    assert trained(run) == [index for index in range(12) if not begins_with <= index < begins_with + 4]
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4]


def overflowing_at(patched, step):
    """The optimizer's steps, of which one leaves a value that float32 holds and float16 does not."""
    real, taken = Learner.step, []

    def overflow(self, *, last=True):
        norm = real(self, last=last)
        taken.append(norm)
        if len(taken) == step:
            with torch.no_grad():
                self.policy.master.model.norm.weight[0] = 1e5
        return norm

    patched.setattr(Learner, "step", overflow)


def in_float16(run):
    exact = dataclasses.replace(run.config.trainer, autocast=False)
    run.config = dataclasses.replace(run.config, model=ModelConfig(name="tiny", dtype="float16"), trainer=exact)
    save(run.config)
    return run


@pytest.mark.parametrize("last", [False, True])
def test_a_version_that_can_not_be_sent_is_no_checkpoint(make_run, monkeypatch, capfd, last):
    """Infinite on the wire alone, after the last step too. A run resumes from the checkpoint before."""
    run = in_float16(make_run(steps=2 if last else 4, checkpoint_every=1)).start()
    with monkeypatch.context() as patched:
        overflowing_at(patched, 2)
        assert train(run) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == (
        "inflight trainer: version 2 is rejected: model.norm.weight holds NaN or Inf (1 of 128 values, in float16)"
    )
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-000001"]
    assert train(go_on(run)) == 0
    assert sorted(trained(run)) == list(range(2 * run.config.trainer.steps))


def test_a_gradient_of_a_version_that_can_not_be_sent_is_reported_as_that(make_run, monkeypatch, capfd):
    """The next gradient may be seen first; the weights are to blame, and must not be kept on its account."""
    run = in_float16(make_run(steps=4)).start()
    overflowing_at(monkeypatch, 2)
    clip = Learner._clip
    harmed = lambda self: self.policy.master.model.norm.weight[0] > 1e4  # noqa: E731
    monkeypatch.setattr(Learner, "_clip", lambda self: float("nan") if harmed(self) else clip(self))
    assert train(run) == 1
    assert "version 2 is rejected: model.norm.weight holds" in capfd.readouterr().err.splitlines()[-1]
    assert index.newest(run.folder) is None


def test_weights_that_can_not_be_sent_are_not_begun_with(make_run, capfd):
    """A checkpoint of a run with `publish.finite_check=false`, say: no generator is compared under it."""
    run = make_run(steps=1).start()
    assert train(run) == 0
    weights = index.newest(run.folder) / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, weights, metadata={"format": "pt"})
    go_on(run, steps=2)
    run.config.routes_file.unlink()  # as the launcher does
    assert train(run) == 1
    assert "version 1 is rejected: model.norm.weight holds" in capfd.readouterr().err.splitlines()[-1]
    assert not run.config.routes_file.exists()


def test_an_error_of_the_last_checkpoint_is_reported(make_run, monkeypatch, capfd):
    run = make_run(steps=4).start()
    clip = Learner._clip
    monkeypatch.setattr(Learner, "_clip", lambda self: (clip(self), float("nan"))[bool(self.optimizer.state)])

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(loop, "save_checkpoint", full)
    assert train(run) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.endswith("(trainer.max_skipped_updates=3) and no checkpoint could be written: No space left on device")


def test_no_batch_in_time_is_one_clear_line(make_run, capfd):
    run = make_run(batch_timeout_s=0.5).start(actor=False)
    assert train(run) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("inflight trainer: no batch within 0")
    assert "actors alive: none" in last


def test_a_generator_that_never_joins_is_named(make_run, capfd):
    run = make_run()
    object.__setattr__(run.config.publish, "join_timeout_s", 0.3)
    save(run.config)
    assert train(run) == 1
    assert "not enough generators have joined after 0.3 s (g0 ABSENT" in capfd.readouterr().err


def test_the_last_line_tells_what_else_went_wrong(capsys):
    error = TimeoutError("no batch\ncame")
    error.add_note("and no checkpoint could be written: no space")
    assert say_why("trainer", error, 1) == 1
    assert capsys.readouterr().err == "inflight trainer: no batch came and no checkpoint could be written: no space\n"
    assert say_why("trainer", RuntimeError(), 1) == 1
    assert capsys.readouterr().err == "inflight trainer: RuntimeError()\n"


def test_a_generator_that_dies_ends_the_run(make_run, capfd):
    """After the time that one which is started again has to come back."""
    run = make_run(steps=10_000, batch_timeout_s=600.0)
    object.__setattr__(run.config.publish, "join_timeout_s", 5.0)
    save(run.config)
    run.start()
    with after(lambda: len(run.lines()) >= 2, run.generator.close):
        assert train(run) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("inflight trainer: no generator is left since 5 s: g0 ")


def test_the_end_of_the_data_is_a_normal_end_with_a_code_of_its_own(make_run, monkeypatch, capfd):
    """All that was learnt is kept and all processes get Finish, as at the end of the steps."""
    run = make_run(steps=4).start()
    take, phases, waited = Buffer.take, [], []
    monkeypatch.setattr(Reporter, "phase", lambda self, text: phases.append(text))

    def taken(self, wanted, version, timeout_s):
        waited.append(phases[-2:])
        if version == 2:
            raise DataEnded("all 4 questions are settled")
        return take(self, wanted, version, timeout_s)

    monkeypatch.setattr(Buffer, "take", taken)
    assert train(run) == DATA_ENDED
    assert waited == [["training", "waiting for a batch"]] * 3
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == "inflight trainer: the data ended after step 2 of 4: all 4 questions are settled"
    assert index.newest(run.folder).name == "step-000002"
    assert run.actor.finish.reason == "the data ended after 2 steps"


def test_data_that_ends_before_the_first_step_names_what_was_lost(make_run, monkeypatch, capfd):
    run = make_run(steps=4).start()
    said = "all 114 questions were asked, 114 of 114 groups failed (reward error: KeyError: 114), and 0 groups are left"

    def taken(self, wanted, version, timeout_s):
        raise DataEnded(said)

    monkeypatch.setattr(Buffer, "take", taken)
    assert train(run) == DATA_ENDED
    assert capfd.readouterr().err.splitlines()[-1] == f"inflight trainer: no step was taken of 4: {said}"


def test_sigterm_keeps_the_last_whole_step(make_run):
    run = make_run(steps=10_000).start()
    with after(lambda: len(run.lines()) >= 2, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert train(run) == STOPPED, "a run that was stopped is no success"
    steps = run.lines()[-1]["step"]
    assert [p.name for p in (run.folder / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert run.actor.finish.reason == "the trainer was stopped"


def test_sigterm_wakes_a_trainer_that_waits_for_a_batch(make_run):
    run = make_run(batch_timeout_s=600.0).start(actor=False)

    def waiting():
        return any(status.values.get("phase") == "waiting for a batch" for status in run.read_statuses())

    with after(waiting, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert train(run) == STOPPED
    assert run.lines() == []


def test_a_rule_that_does_not_exist_is_refused_at_the_start(make_run, capfd):
    run = make_run()
    object.__setattr__(run.config.gate, "rules", [{"name": "newest"}])
    save(run.config)
    assert train(run) == 2
    assert "gate.rules[0].name='newest' is not known" in capfd.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capfd):
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "is not a run folder" in capfd.readouterr().err
