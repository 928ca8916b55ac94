"""A trainer of two processes, with gloo: the same numbers as one process, and an end that names a rank that is gone."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest
import torch
from fake_generator import eventually
from model_server import ModelServer
from rollout_samples import make_config
from safetensors.torch import load_file
from test_trainer_run import PPO, FakeActor, Run

from inflight.bus import Listener
from inflight.config import ConfigError, ModelConfig, ObjectiveConfig, TrainerConfig, save
from inflight.config.lora import LoraConfig
from inflight.exits import STOPPED
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.devices import assign
from inflight.trainer.__main__ import main
from inflight.trainer.checkpoint import index

STEPS = 3
SKIPS_THE_SECOND = {"objective": PPO, "poisoned": {"q5"}}
TOLERANCE = 1e-6


class Trainers:
    """The trainer's processes of a run, each with its log."""

    def __init__(self, run):
        self.run = run
        self.processes = []
        for rank in range(run.config.trainer.processes):
            with (run.folder / f"rank{rank}.log").open("w") as log:
                argv = [sys.executable, "-m", "inflight.trainer", "--run-dir", str(run.folder), "--rank", str(rank)]
                self.processes.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT))

    def wait(self, timeout_s=400.0):
        """Exit codes, rank by rank; then the others go home too."""
        self.processes[0].wait(timeout_s)
        self.run.close()
        return [process.wait(timeout_s) for process in self.processes]

    def log(self, rank):
        return (self.run.folder / f"rank{rank}.log").read_text()

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait(10)
        self.run.close()


@pytest.fixture(scope="module")
def make_trainers(tmp_path_factory):
    """Runs with a played generator and actor, whose trainer is real."""
    opened = []

    def make(dtype="float32", server=None, poisoned=frozenset(), **trainer):
        settings = {"steps": STEPS, "groups_per_step": 4, "autocast": dtype == "bfloat16"}
        run = Run(tmp_path_factory.mktemp("run"), **(settings | trainer))
        run.config = dataclasses.replace(run.config, model=ModelConfig(name="tiny", dtype=dtype))
        save(run.config)
        run.poisoned = poisoned
        run.start(server=server)
        opened.append(Trainers(run))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def two(make_trainers, tiny_model):
    """A float32 run over two ranks, which compares its numbers with a real model's; in its last round of micro-batches
    one rank has nothing to do, and the gradient of its second batch is not finite. Its checkpoint is in bfloat16."""
    server = ModelServer(tiny_model)
    trainers = make_trainers(
        server=server,
        processes=2,
        micro_batch=3,
        compare_start="refuse",
        checkpoint_dtype="bfloat16",
        **SKIPS_THE_SECOND,
    )
    assert trainers.wait() == [0, 0], trainers.log(0) + trainers.log(1)
    server.close()
    return trainers


@pytest.fixture(scope="module")
def one(make_trainers):
    trainers = make_trainers(micro_batch=3, **SKIPS_THE_SECOND)
    assert trainers.wait() == [0], trainers.log(0)
    return trainers


def distance(ours, theirs):
    """Relative, over all tensors."""
    assert ours.keys() == theirs.keys()
    square = sum((ours[name].double() - theirs[name].double()).square().sum() for name in ours)
    return float((square / sum(each.double().square().sum() for each in theirs.values())).sqrt())


def test_two_ranks_learn_what_one_process_learns(one, two):
    for ours, theirs in zip(two.run.lines(), one.run.lines(), strict=True):
        assert ours["tokens_trained"] == theirs["tokens_trained"] == 40
        for name in ("loss", "grad_norm", "log_ratio_mean", "log_ratio_max", "clip_share", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=5 * TOLERANCE, abs=1e-9), name
    for step in range(STEPS + 1):
        version = [load_file(trainers.run.config.version_file(step)) for trainers in (two, one)]
        assert distance(*version) <= TOLERANCE
    start, end = (load_file(one.run.config.version_file(step)) for step in (0, STEPS))
    assert distance(end, start) > 100 * TOLERANCE


def test_two_ranks_skip_a_gradient_that_is_not_finite_as_one_process_does(one, two):
    for trainers in (one, two):
        lines = trainers.run.lines()
        assert [line["updates_skipped"] for line in lines] == [0, 1, 0]
        assert [line["questions"] for line in lines] == [[*range(4)], [*range(8, 12)], [*range(12, 16)]]
        moments = load_file(index.newest(trainers.run.folder) / "trainer" / "optimizer.safetensors")
        assert moments["model.norm.weight.step"] == STEPS


def test_two_ranks_compute_what_a_generator_does_and_are_shards_again_afterwards(two):
    """The forward pass without a backward one: what is published and kept after it is compared by the other tests."""
    told = [line["compared"]["g0"] for line in two.run.lines() if "compared" in line]
    assert [(figures["version"], figures["agrees"]) for figures in told] == [(0, True), (1, True)]


def test_checkpoints_hold_the_whole_model_and_optimizer(one, two):
    ours, theirs = (next(each.run.folder.glob("checkpoints/step-*")) for each in (two, one))
    for name, other in (("master", "../model"), ("optimizer", "optimizer")):
        files = [ours / "trainer" / f"{name}.safetensors", theirs / "trainer" / f"{other}.safetensors"]
        assert distance(*map(load_file, files)) <= 1e-5
    version = load_file(two.run.config.version_file(STEPS))
    for name, dtype in (("trainer/master", torch.float32), ("model", torch.bfloat16)):
        model = load_file(ours / f"{name}.safetensors")
        assert all(torch.equal(model[key], each.to(dtype)) for key, each in version.items())


def test_a_published_version_is_byte_for_byte_that_of_one_process(one, two):
    """The start, which both hold alike; and the end, against the checkpoint that one process packs."""
    first = [load_file(trainers.run.config.version_file(0)) for trainers in (two, one)]
    assert all(torch.equal(first[0][name], first[1][name]) for name in first[1])
    live = two.run.generator.shadows[0].live
    kept = load_file(two.run.config.version_file(STEPS))
    assert live.keys() == kept.keys()
    assert all(torch.equal(live[name], kept[name]) for name in kept)


def go_on(trainers, folder, **trainer):
    """A copy of the run, resumed from its checkpoint."""
    return Trainers(resumed(trainers.run, folder, **trainer).start())


def resumed(before, folder, **trainer):
    """A copy of a run, to be resumed."""
    shutil.copytree(before.folder, folder, ignore=shutil.ignore_patterns("bus"))
    (folder / "bus").mkdir()
    run = copy.copy(before)
    run.folder, run.statuses = folder, []
    run.config = dataclasses.replace(
        run.config,
        run_dir=str(folder),
        resume=True,
        checkpoint=str(index.newest(folder)),
        trainer=dataclasses.replace(run.config.trainer, compare_start="off", **trainer),
    )
    save(run.config)
    run.launcher = Listener(run.config.endpoint("status"), run.config.bus)
    return run


def alone(run):
    """Trains in this process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--run-dir", str(run.folder)]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
        run.close()
    return run


def test_two_ranks_train_an_adapter_on_from_where_one_was(tmp_path):
    """Over a sharded base, with a KL to it: what is published, kept and saved is what one process has."""
    settings = {"steps": 2, "groups_per_step": 4, "micro_batch": 3, "autocast": False}
    (tmp_path / "start").mkdir()
    objective, lora = ObjectiveConfig(kl=0.1), LoraConfig(rank=4, alpha=20.0)
    start = Run(tmp_path / "start", **settings, objective=objective, lora=lora)
    start.config = dataclasses.replace(start.config, model=ModelConfig(name="tiny", dtype="float32"))
    save(start.config)
    alone(start.start())
    two = Trainers(resumed(start, tmp_path / "two", processes=2, steps=4).start())
    try:
        assert two.wait() == [0, 0], two.log(0) + two.log(1)
    finally:
        two.close()
    one = alone(resumed(start, tmp_path / "one", steps=4).start())
    ours, theirs = ([load_file(run.config.version_file(step)) for step in range(2, 5)] for run in (two.run, one))
    assert distance(ours[0], theirs[0]) == 0
    assert all(distance(*versions) <= 10 * TOLERANCE for versions in zip(ours, theirs, strict=True))
    assert distance(theirs[2], theirs[0]) > 1000 * TOLERANCE
    live = two.run.generator.shadows[0].live
    assert live.keys() == ours[2].keys()
    assert all(torch.equal(live[name], matrix) for name, matrix in ours[2].items())
    for name in ("adapter_model", "trainer/optimizer"):
        saved = [load_file(index.newest(run.folder) / f"{name}.safetensors") for run in (two.run, one)]
        assert distance(*saved) <= 1e-4


def test_a_run_is_resumed_with_another_number_of_ranks(two, tmp_path):
    continued = []
    for processes in (2, 1):
        continued.append(go_on(two, tmp_path / str(processes), processes=processes, steps=STEPS + 2))
        try:
            assert set(continued[-1].wait()) == {0}, "".join(map(continued[-1].log, range(processes)))
        finally:
            continued[-1].close()
        begun = load_file(continued[-1].run.config.version_file(STEPS))
        kept = load_file(two.run.config.version_file(STEPS))
        assert all(torch.equal(begun[name], kept[name]) for name in kept), "from weights that bfloat16 can't hold"
    end, other = (load_file(each.run.config.version_file(STEPS + 2)) for each in continued)
    assert distance(end, other) <= TOLERANCE
    assert distance(end, load_file(two.run.config.version_file(STEPS))) > 100 * TOLERANCE


def test_in_bfloat16_ranks_do_what_the_twin_does(make_trainers):
    both = [make_trainers("bfloat16", processes=processes) for processes in (2, 1)]
    for trainers in both:
        assert set(trainers.wait()) == {0}, "".join(map(trainers.log, range(len(trainers.processes))))
    for ours, theirs in zip(*(trainers.run.lines() for trainers in both), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2, abs=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    start, end = ([load_file(each.run.config.version_file(step)) for each in both] for step in (0, STEPS))
    assert all(torch.equal(start[0][name], start[1][name]) for name in start[1])
    assert distance(*end) < 0.2 * distance(end[1], start[1])


def test_ranks_may_pack_their_rows(make_trainers, monkeypatch):
    monkeypatch.setattr(FakeActor, "lengths", (9, 1))
    both = [make_trainers(packing=packing, processes=1 + packing, micro_batch=3) for packing in (True, False)]
    for trainers in both:
        assert set(trainers.wait()) == {0}, "".join(map(trainers.log, range(len(trainers.processes))))
    for ours, theirs in zip(*(trainers.run.lines() for trainers in both), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    start, end = ([load_file(each.run.config.version_file(step)) for each in both] for step in (0, STEPS))
    assert distance(*end) < 1e-2 * distance(end[1], start[1])


def test_several_updates_a_batch_are_the_same_over_ranks(make_trainers):
    """Each rank scores its share before the first update; one version is published after all of them."""
    updates = {"updates_per_batch": 2, "epochs_per_batch": 2, "warmup_steps": 2, "micro_batch": 3}
    both = [make_trainers(processes=processes, **updates) for processes in (2, 1)]
    for trainers in both:
        assert set(trainers.wait()) == {0}, "".join(map(trainers.log, range(len(trainers.processes))))
    for ours, theirs in zip(*(trainers.run.lines() for trainers in both), strict=True):
        assert ours["updates"] == theirs["updates"] == 4
        assert ours["tokens_trained"] == theirs["tokens_trained"] == 40
        for row, other in zip(ours["by_update"], theirs["by_update"], strict=True):
            assert row == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert ours["by_update"][-1]["drift"] > 1e-4
    start, end = ([load_file(each.run.config.version_file(step)) for each in both] for step in (0, STEPS))
    assert distance(*end) < 1e-4 * distance(end[1], start[1])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_is_gone_ends_the_run_and_is_named(make_trainers, stopped):
    trainers = make_trainers(processes=2, steps=10_000, rank_timeout_s=8.0)
    eventually(lambda: len(trainers.run.lines()) >= 2, "training", timeout_s=300)
    trainers.processes[1].send_signal(signal.SIGSTOP if stopped else signal.SIGKILL)
    assert trainers.processes[0].wait(120) == 1
    trainers.close()
    last = trainers.log(0).strip().splitlines()[-1]
    assert last.startswith("inflight trainer: ")
    assert "trainer.1" in last


def test_a_stop_is_seen_by_all_ranks_at_the_same_point(make_trainers):
    trainers = make_trainers(processes=2, steps=10_000)
    eventually(lambda: len(trainers.run.lines()) >= 2, "training", timeout_s=300)
    assert scraped(trainers.run.folder / "bus" / "targets" / "trainer.1.json")["learn"] >= 2
    for process in trainers.processes:
        os.kill(process.pid, signal.SIGTERM)
    assert trainers.wait() == [STOPPED, 0], trainers.log(0) + trainers.log(1)
    done = trainers.run.lines()[-1]["step"]
    assert [path.name for path in (trainers.run.folder / "checkpoints").iterdir()] == [f"step-{done:06d}"]


def scraped(target):
    """Orders that a rank has carried out, by the metrics that it announces to Prometheus."""
    (entry,) = json.loads(target.read_text())
    assert entry["labels"]["process"] == "trainer.1"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://{entry['targets'][0]}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    orders = re.findall(r'^inflight_trainer_rank_orders_total\{order="(\w+)"\} ([\d.]+)$', text, re.MULTILINE)
    return {order: float(number) for order, number in orders}


def test_a_rank_that_does_not_come_is_named(tmp_path, capfd):
    config = dataclasses.replace(make_config(tmp_path), trainer=TrainerConfig(processes=2))
    object.__setattr__(config.publish, "join_timeout_s", 0.5)
    save(config)
    (tmp_path / "bus").mkdir()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--run-dir", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "trainer.1 has not joined after 0.5 s" in capfd.readouterr().err


def test_what_can_not_be_is_refused(tmp_path, capfd):
    with pytest.raises(ConfigError, match=r"trainer\.processes=0 is not allowed: 1 or more"):
        compose("tiny", ["trainer.processes=0"])
    with pytest.raises(ConfigError, match=r"trainer\.processes=9 is not allowed: a step has 8 sequences"):
        compose("tiny", ["trainer.processes=9"])
    with pytest.raises(ConfigError, match=r"trainer\.processes=2 is not allowed: that takes 3 GPUs, there are 2"):
        assign(compose("tiny", ["trainer.processes=2"]), ["0", "1"])
    save(compose("tiny", [f"run_dir={tmp_path}"]))
    assert main(["--run-dir", str(tmp_path), "--rank", "1"]) == 2
    assert "--rank=1 is not allowed: 0 to 0 (trainer.processes)" in capfd.readouterr().err


def test_ranks_are_started_with_a_gpu_and_a_log_each(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    commands = {
        each.name: each for each in usual_commands(compose("tiny", [f"run_dir={tmp_path}", "trainer.processes=2"]))
    }
    assert list(commands) == ["trainer", "trainer.1", "g0", "a0"]
    rank = commands["trainer.1"]
    assert rank.argv[1:] == ["-m", "inflight.trainer", "--run-dir", str(tmp_path), "--rank", "1"]
    assert (rank.kind, rank.log.name) == ("rank", "trainer.1.log")
    seen = {name: each.environment.get("CUDA_VISIBLE_DEVICES") for name, each in commands.items()}
    assert seen == {"trainer": "4", "trainer.1": "5", "g0": "6,4", "a0": None}
