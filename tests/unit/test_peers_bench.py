"""The bench of ways to update a generator: what it counts and reports, and in which order a way calls the engine."""

from __future__ import annotations

import asyncio
import copy
import threading
from types import SimpleNamespace

import pytest
import torch

from bench.peers.async_grpo import Reward
from bench.peers.control import Activity, Caller, Control, ControlError
from bench.peers.figures import best_shared_reward, figures_of, reached, rotated, table, with_times
from bench.peers.varlen import flash_attn_varlen_func
from bench.peers.ways import WAYS, ArmPublisher
from inflight.config import TaskConfig
from inflight.prompts import ModelTokens
from inflight.tasks import make
from inflight.types import Route


def line(**values):
    return {
        "tokens_trained": 80,
        "tokens_masked": 20,
        "wait_s": 3.0,
        "publish_wait_s": 0.5,
        "pack_s": 0.25,
        "guard_s": 0.25,
        "lag_mean": 1.0,
        "groups_dropped": {},
        "groups_failed": {},
        **values,
    }


def arm(name, seed, held_out, **values):
    figures = figures_of([line()], 10.0, {"idle_s": 1.0, "paused_s": 1.0, "working_s": 8.0, "sequences": 4.0})
    return {"arm": name, "seed": seed, **figures, "publish_ms": 5.0, "held_out": held_out, **values}


def test_shares_are_of_the_seconds_that_the_arm_trained():
    activity = {"idle_s": 2.0, "paused_s": 1.0, "working_s": 5.0, "sequences": 3.5}
    lines = [line(lag_0={"agrees": True}), line(lag_mean=3.0, tokens_trained=40, lag_0={"agrees": False})]
    found = figures_of(lines, 8.0, activity)
    assert found["tokens_per_s"] == 160 / 8
    assert found["trainer_waits_share"] == 6 / 8
    assert found["publishing_share"] == 2 / 8
    assert (found["generator_idle_share"], found["generator_paused_share"]) == (2 / 8, 1 / 8)
    assert found["lag_mean"] == (1.0 * 80 + 3.0 * 40) / 120
    assert found["masked_share"] == 40 / 160
    assert found["lag_0_agrees"] == [1, 2]


def test_an_arm_without_a_step_has_figures_too():
    found = figures_of([], 0.0, {"idle_s": 0.0, "paused_s": 0.0, "working_s": 0.0, "sequences": 0.0})
    assert (found["steps"], found["tokens_per_s"], found["lag_mean"]) == (0, 0.0, 0.0)


def test_a_curve_reaches_a_reward_between_two_of_its_points():
    curve = [(0.0, 0.2), (2.0, 0.4), (4.0, 0.3), (6.0, 0.7)]
    assert reached(curve, 0.3) == pytest.approx(1.0), "on the line from 0.2 to 0.4; later dips don't matter"
    assert reached(curve, 0.5) == pytest.approx(5.0)
    assert reached(curve, 0.1) == 0.0
    assert reached(curve, 0.8) is None


def test_the_reward_that_all_arms_of_a_seed_reach_is_the_worst_ones_best():
    arms = [arm("a", 0, [(0.0, 0.1), (2.0, 0.9)]), arm("b", 0, [(0.0, 0.1), (4.0, 0.5), (6.0, 0.4)])]
    assert best_shared_reward(arms) == 0.5
    timed = with_times([*arms, arm("a", 1, [(0.0, 0.1), (2.0, 0.6)])])
    assert [each["to_target_s"] for each in timed] == pytest.approx([1.0, 4.0, None]), "seed 1 has one arm only"


def test_the_table_has_a_row_for_each_arm_and_a_cell_for_each_heading():
    arms = [arm("a", 0, [(0.0, 0.1), (2.0, 0.9)]), arm("b", 0, [(0.0, 0.1), (4.0, 0.5)]), arm("a", 1, [(0.0, 0.3)])]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(arms).splitlines()]
    assert len({len(row) for row in rows}) == 1
    assert [row[:2] for row in rows[2:]] == [["a", "2"], ["b", "1"]]
    assert rows[2][-2:] == ["0.600 (0.300 to 0.900)", "1.0"]


def test_every_arm_is_first_under_some_seed():
    assert [rotated(["a", "b", "c"], seed)[0] for seed in range(4)] == ["a", "b", "c", "a"]


def test_an_engine_that_is_paused_is_neither_idle_nor_working():
    moments = iter([0.0, 1.0, 2.0, 3.0, 6.0, 10.0, 11.0])
    activity = Activity(lambda: next(moments))
    activity.look(0)
    activity.look(2)
    activity.pause(True, 2)
    activity.pause(False, 2)
    activity.look(4)
    taken = activity.take()
    assert taken == {"idle_s": 1.0, "working_s": 2.0 + 4.0, "paused_s": 3.0, "sequences": (2 * 2 + 2 * 3 + 4 * 4) / 10}
    activity.look(0)
    assert activity.take()["idle_s"] == 1.0, "a reading forgets what was read before"


class Engine:
    """AsyncLLM's methods that the bench calls; keeps the order."""

    def __init__(self):
        self.calls = []
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 3)
        self.engine_core = self

    async def pause_generation(self, *, mode, clear_cache):
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self):
        self.calls.append(("resume",))

    async def call_utility_async(self, method, *args):
        self.calls.append((method, *args))
        if method == "collective_rpc" and args[0] == "broken":
            raise ValueError("no such method")
        return [{"gap_s": 0.0}]


@pytest.fixture
def served(tmp_path):
    """An engine behind a control socket, and a caller of it."""
    engine, ready, over = Engine(), threading.Event(), threading.Event()

    async def serve():
        async with Control(engine, tmp_path / "control").serving():
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    caller = Caller(tmp_path / "control", 10.0)
    yield engine, caller
    caller.close()
    over.set()
    thread.join(10)


def test_a_call_reaches_the_engine_and_an_error_comes_back(served):
    engine, caller = served
    caller.call("pause", "keep")
    assert caller.call("rpc", "update_weights", {"packed": True}) == [{"gap_s": 0.0}]
    caller.call("commit_weights", 7)
    caller.call("resume")
    assert engine.calls == [
        ("pause", "keep", False),
        ("collective_rpc", "update_weights", None, [{"packed": True}]),
        ("commit_weights", 7),
        ("resume",),
    ]
    assert caller.call("running") == 3
    assert caller.call("activity")["paused_s"] > 0
    with pytest.raises(ControlError, match="rpc: ValueError: no such method"):
        caller.call("rpc", "broken")
    assert {name: len(each) for name, each in caller.seconds.items()} == {
        "pause": 1,
        "update_weights": 1,
        "commit_weights": 1,
        "resume": 1,
        "running": 1,
        "activity": 1,
    }


class Inner:
    """What an arm's publisher needs of inflight's."""

    version = 4
    events = ("earlier",)

    def __init__(self):
        self.published = []

    def publish(self, version):
        self.published.append(version)
        return SimpleNamespace(version=version)

    @property
    def committed(self):
        return {"g0": 4}

    @property
    def served(self):
        return {"g0": Route(url="http://g", version=4, incarnation="i")}

    def events_since(self, cursor):
        return ["earlier", "now"][cursor:]

    def finish(self, reason):
        raise AssertionError("the generator serves the next arm")


class Calls:
    """The order of calls, of the engine and of the transfer."""

    def __init__(self, ranks=({"gap_s": 0.0},)):
        self.made, self._ranks = [], list(ranks)

    def call(self, *asked):
        self.made.append(asked)
        return self._ranks if asked[0] == "commit_weights" else None

    def send(self, version, *, packed):
        self.made.append(("send", version, packed))


@pytest.mark.parametrize(("way", "mode", "packed"), [("keep_each", "keep", False), ("abort_resume", "abort", True)])
def test_another_way_pauses_sends_stamps_and_resumes(way, mode, packed):
    calls, inner = Calls(), Inner()
    publisher = ArmPublisher(inner, WAYS[way], calls, calls)
    publisher.publish(5)
    assert calls.made == [("pause", mode), ("send", 5, packed), ("commit_weights", 5), ("resume",)]
    assert inner.published == []
    assert (publisher.version, publisher.committed, publisher.behind) == (5, {"g0": 5}, {"g0": 0})
    assert publisher.served["g0"].version == 5, "the trainer compares it as the generator of the newest version"
    assert len(publisher.blocked_s) == 1


def test_inflights_own_way_publishes_and_says_nothing_to_the_engine():
    calls, inner = Calls(), Inner()
    publisher = ArmPublisher(inner, WAYS["inflight"], calls, None)
    publisher.publish(5)
    assert (inner.published, calls.made) == ([5], [])
    assert publisher.behind == {"g0": 1}, "until its commit"
    assert publisher.events_since(0) == ["now"], "what other arms did is not this arm's"
    publisher.finish("over")


def test_a_version_that_a_rank_did_not_take_is_an_error_and_the_engine_stays_paused():
    calls = Calls([{"gap_s": 0.0}, {"error": "torn"}])
    with pytest.raises(RuntimeError, match="version 5: torn"):
        ArmPublisher(Inner(), WAYS["keep_packed"], calls, calls).publish(5)
    assert ("resume",) not in calls.made


def test_a_segment_sees_its_whole_path_and_nothing_after_itself():
    """Two branches of five and three tokens after a trunk of four: each token as in a sequence of its own."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    trunk, branches = list(range(4)), [list(range(4, 9)), list(range(9, 12))]
    paths = [trunk, *(trunk + branch for branch in branches)]
    kv = torch.tensor([place for path in paths for place in path])
    cu_q, cu_k = torch.tensor([0, 4, 9, 12]), torch.tensor([0, *torch.tensor([len(path) for path in paths]).cumsum(0)])
    found = flash_attn_varlen_func(query, key[kv], value[kv], cu_q, cu_k, 5, 9, 0.3, causal=True)
    for branch, path in zip(branches, paths[1:], strict=True):
        whole = torch.nn.functional.scaled_dot_product_attention(
            query[path].transpose(0, 1),
            key[path].repeat_interleave(2, 1).transpose(0, 1),
            value[path].repeat_interleave(2, 1).transpose(0, 1),
            is_causal=True,
            scale=0.3,
        ).transpose(0, 1)
        torch.testing.assert_close(found[trunk], whole[:4])
        torch.testing.assert_close(found[branch], whole[4:])
    with pytest.raises(ValueError, match="without a window"):
        flash_attn_varlen_func(query, key[kv], value[kv], cu_q, cu_k, 5, 9, 0.3, causal=True, window_size=(4, 0))


def test_the_reward_in_trls_rollout_process_is_the_tasks_own():
    options = {"held_out": 20}
    reward = copy.deepcopy(Reward("addition", options, 3, "tiny"))  # as its process gets it
    task, tokens = make(TaskConfig("addition", options), 3), ModelTokens("tiny")
    right = list(tokens.encode(str(task.item(5).answer)))
    assert asyncio.run(reward([right, right[:1], []], index=[5, 5, 5])) == [1.0, 0.5, 0.0]


def test_the_whole_bench_can_be_imported():
    """Most of it runs under `slow` only: a name that has changed shows here."""
    from bench.peers.bench import Bench
    from bench.peers.generator import worker_of

    assert callable(Bench)
    assert worker_of(None, cpu=True).startswith("bench.peers.worker_cpu.")
