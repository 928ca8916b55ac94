"""The figures of a run, from its folder."""

from __future__ import annotations

import json
import re

import pytest

from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, JsonLines, read_lines
from inflight.report import summary, summary_text
from inflight.report.summary import Spread, summarize
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import Rollout, RolloutGroup, Turn, VersionSpan

NO_TIME = dict.fromkeys(("wait_s", "train_s", "publish_wait_s", "pack_s"), 0.0)


def rollout(
    name: str, spans: list[tuple[int, int]], tokens: int = 4, at: float = 100.0, retries: dict[str, int] | None = None
) -> Rollout:
    turn = Turn(
        token_ids=[1] * tokens,
        logprobs=[-0.5] * tokens,
        token_versions=[VersionSpan(*span) for span in spans],
        prefill_versions=[],
        finish_reason="stop",
    )
    return Rollout(
        rollout_id=name,
        group_id="q",
        prompt_ids=[1],
        turn=turn,
        reward=1.0,
        generator="g0",
        started=at,
        finished=at + 2,
        first_token_s=0.1,
        retries=retries or {},
    )


@pytest.fixture
def run(tmp_path):
    """A run of seven steps, three swaps (one of an idle engine), one failed, one superseded, and four rollouts."""
    with JsonLines(tmp_path / METRICS_FILE) as metrics:
        for step in range(1, 8):
            metrics.write(
                {
                    "step": step,
                    "version": step,
                    "time_s": 100 + step * 2.0,
                    "reward": step / 10,
                    "wait_s": 1.5,
                    "train_s": 0.25,
                    "publish_wait_s": 0.001 * step,
                    "pack_s": 0.001,
                    "guard_s": 0.0004,
                    "tokens_trained": 10,
                    "tokens_masked": 1,
                    "lag_counts": {0: 6, 1: 4},
                    "groups_dropped": {"old": step},
                    "groups_failed": {"actor lost": 1},
                    "rollouts_dropped": {"too old on average": 2 * step},
                }
            )
    with JsonLines(tmp_path / SWAPS_FILE) as swaps:
        for version, running, gap in ((1, 3, 0.001), (2, 0, 0.004), (3, 2, 0.002)):
            swaps.write({"event": "committed", "version": version, "generator": "g0", "gap_s": gap, "running": running})
        swaps.write({"event": "failed", "version": 4, "generator": "g0", "phase": "receive", "reason": "late"})
        swaps.write({"event": "superseded", "version": 5, "generator": "g0", "reason": "slow"})
    with Writer(tmp_path / ROLLOUTS_FILE) as writer:
        rollouts = [
            rollout("a", [(0, 0)]),
            rollout("b", [(0, 0), (2, 1)], at=101.0),
            rollout("c", [(0, 0), (1, 1), (3, 2)], at=102.0),
            rollout("d", [(0, 2)], retries={"aborted": 1, "connection lost": 2}, at=103.0),
        ]
        writer.append(RolloutGroup(group_id="q", prompt_key="k", rollouts=rollouts))
    return tmp_path


def test_a_swap_of_which_the_engine_said_nothing_is_not_one_through_running_sequences(run):
    with JsonLines(run / SWAPS_FILE) as swaps:
        swaps.write({"event": "committed", "version": 4, "generator": "g0", "gap_s": 0.002, "running": None})
    got = summarize(run)
    assert (got.swaps, got.swaps_while_running) == (4, 2)


def test_the_time_in_which_a_run_was_dead_is_no_part_of_its_rates(tmp_path):
    """Two starts: 3 steps of 2 s each; an hour later, 2 steps of 4 s each, after a minute without one."""
    began, resumed = 1_000.0, 5_000.0
    took = {"wait_s": 1.5, "train_s": 0.25, "publish_wait_s": 0.15, "pack_s": 0.1}
    later = {"wait_s": 3.5, "train_s": 0.25, "publish_wait_s": 0.15, "pack_s": 0.1}
    with JsonLines(tmp_path / METRICS_FILE) as metrics:
        for step, at in enumerate((10, 12, 14), 1):
            metrics.write({"step": step, "time_s": at, "time": began + at, "reward": 0.5, **took})
        for step, at in enumerate((64, 68), 4):  # its clock continues from the checkpoint, at 14 s; drifts a little
            metrics.write(
                {"step": step, "time_s": 14 + at, "time": resumed + at + 0.001 * step, "reward": 0.5, **later}
            )
    (tmp_path / SWAPS_FILE).touch()
    with Writer(tmp_path / ROLLOUTS_FILE) as writer:
        rollouts = [rollout("a", [(0, 0)], at=began + 8), rollout("b", [(0, 3)], tokens=24, at=resumed + 66)]
        writer.append(RolloutGroup(group_id="q", prompt_key="k", rollouts=rollouts))
    got = summarize(tmp_path)
    assert got.seconds == pytest.approx(3 * 2 + 2 * 4)
    assert got.tokens_per_s == pytest.approx(28 / 14, rel=1e-3)


@pytest.mark.parametrize(
    ("started", "rate"),
    [
        ("1970-01-01 01:23:20 +0000", 28 / (6 + 2)),  # at 5000 s
        ("1970-01-01 03:23:20 +0200", 28 / (6 + 2)),
        ("1970-01-01 00:16:40 +0000", 28 / 4058),  # at 1000 s: the steps are of this start, which then waited so long
        ("yesterday", 28 / 4058),
        (None, 28 / 4058),
    ],
)
def test_a_start_without_a_step_does_not_count_the_time_in_which_the_run_was_dead(tmp_path, started, rate):
    """A start of 3 steps of 2 s each; an hour later one that has sampled for 2 s, and ended without a step."""
    took = {"wait_s": 1.5, "train_s": 0.25, "publish_wait_s": 0.15, "pack_s": 0.1}
    with JsonLines(tmp_path / METRICS_FILE) as metrics:
        for step, at in enumerate((10, 12, 14), 1):
            metrics.write({"step": step, "time_s": at, "time": 1_000.0 + at, "reward": 0.5, **took})
    (tmp_path / SWAPS_FILE).touch()
    if started:
        (tmp_path / "environment.json").write_text(json.dumps({"started": started}))
    with Writer(tmp_path / ROLLOUTS_FILE) as writer:
        rollouts = [rollout("a", [(0, 0)], at=1_008), rollout("b", [(0, 3)], tokens=24, at=5_064)]
        writer.append(RolloutGroup(group_id="q", prompt_key="k", rollouts=rollouts))
    assert summarize(tmp_path).tokens_per_s == pytest.approx(rate)


def test_every_figure(run):
    got = summarize(run)
    assert (got.steps, got.version, got.seconds) == (7, 7, pytest.approx(12 + 1.75 + 0.002))
    assert (got.swaps, got.swaps_while_running, got.swaps_failed, got.swaps_superseded) == (3, 2, 1, 1)
    assert got.gap_ms == Spread(median=2.0, max=4.0)
    assert got.publish_wait_ms.median == pytest.approx(5.4)
    assert got.publish_wait_ms.max == pytest.approx(8.4)
    assert (got.rollouts, got.aborted, got.retried, got.tokens) == (4, 1, 3, 16)
    assert got.tokens_per_s == pytest.approx(16 / 5)
    assert (got.mixed_rollouts, got.max_versions) == (2, 3)
    assert (got.tokens_trained, got.tokens_masked) == (70, 7)
    assert got.lag == {0: 42, 1: 28}
    assert got.groups_dropped == {"old": 7}
    assert got.groups_failed == {"actor lost": 1}
    assert got.rollouts_dropped == {"too old on average": 14}
    assert got.reward_first == pytest.approx(0.3)
    assert got.reward_last == pytest.approx(0.5)
    assert got.torn_tail is None


def test_it_survives_its_file(run):
    got = summarize(run)
    summary.write(run, got)
    assert summary.read(run) == got
    assert json.loads((run / summary.SUMMARY_FILE).read_text())["swaps"] == 3


def test_the_reward_of_all_groups_stands_beside_that_of_the_trained_ones(run):
    assert (summarize(run).reward_all_last, "of all groups" in summary_text.table(summarize(run))) == (None, False)
    lines = [line | {"reward_all": line["reward"] / 2} for line in read_lines(run / METRICS_FILE)]
    lines += lines[:1] * 3
    (run / METRICS_FILE).unlink()
    with JsonLines(run / METRICS_FILE) as metrics:
        for line in lines:
            metrics.write(line)
    got = summarize(run)
    assert (got.reward_all_first, got.reward_all_last) == (pytest.approx(0.15), pytest.approx(0.16))
    assert "of all groups" in summary_text.table(got)
    assert "0.15 to 0.16, including those that the gate dropped" in summary_text.table(got)


def test_each_reward_and_the_evaluations_are_rows_of_their_own(run):
    assert "held-out" not in summary_text.table(summarize(run))
    assert "each reward" not in summary_text.table(summarize(run))
    with JsonLines(run / METRICS_FILE) as metrics:
        early = [{"short": 8.0}, {}, {}, {}]  # the first one is not of the last steps
        for step, rewards in enumerate((*early, {"short": 0.5, "math": 0.0}, {"short": 0.25}), 8):
            metrics.write({"step": step, "version": step, "time_s": 100 + step * 2.0, "rewards": rewards, **NO_TIME})
    with JsonLines(run / EVAL_FILE) as evaluations:
        evaluations.write({"step": 2, "version": 2, "eval/reward": 0.5, "eval/best": True})
        evaluations.write({"step": 4, "version": 4, "eval/reward": 0.75, "eval/best": True})
        size = {"eval/reward_stderr": 0.0281, "eval/questions": 3.0}
        evaluations.write({"step": 6, "version": 6, "eval/reward": 0.25, "eval/best": False, **size})
        evaluations.write({"step": 8, "version": 8, "eval/given_up": "the evaluator has died"})
    got = summarize(run)
    assert got.rewards_last == {"math": 0.0, "short": 0.375}
    text = summary_text.table(got)
    assert re.search(r"^each reward +math 0, short 0\.375 \(last 5 steps, without its weight\)$", text, re.M)
    assert re.search(
        r"^held-out +0\.25 ± 0\.028 \(version 6, standard error of n=3\), best 0\.75 \(version 4\)$", text, re.M
    )
    summary.write(run, got)
    assert summary.read(run) == got


def test_without_a_best_checkpoint_the_newest_evaluation_stands_alone(run):
    with JsonLines(run / EVAL_FILE) as evaluations:
        evaluations.write({"step": 2, "version": 2, "eval/reward": 0.5})
        evaluations.write({"step": 4, "version": 4, "eval/reward": 0.0})
    assert re.search(r"^held-out +0 \(version 4\)$", summary_text.table(summarize(run)), re.M)
    with JsonLines(run / EVAL_FILE) as evaluations:
        evaluations.write({"step": 6, "version": 6, "eval/reward": 0.0, "eval/questions": 1.0})
    assert re.search(r"^held-out +0 \(version 6, n=1\)$", summary_text.table(summarize(run)), re.M)


def test_the_table_shows_the_figures(run):
    text = summary_text.table(summarize(run))
    assert "3, 2 of them while sequences ran, 1 failed, 1 superseded" in text
    assert "2 ms median, 4 ms at most" in text
    assert "50% of the rollouts hold 2 or more, at most 3" in text
    assert "0:42 1:28" in text
    assert "of groups: 14 too old on average" in text


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (1, "0 (last step)"),
        (3, "1 (last 3 steps)"),
        (9, "6 (last 5 steps)"),
        (10, "2 (first 5 steps) to 7 (last 5)"),
    ],
)
def test_the_first_steps_are_compared_only_with_others(tmp_path, steps, says):
    with JsonLines(tmp_path / METRICS_FILE) as metrics:
        for step in range(steps):
            figures = {"reward": float(step), "reward_all": step + 1.0, **NO_TIME}
            metrics.write({"step": step + 1, "version": step + 1, "time_s": 100.0 + step, **figures})
    rows = dict(summary_text.labelled(summarize(tmp_path)))
    assert rows["reward"] == says
    assert (" to " in rows["of all groups"]) == (steps == 10)


def test_an_empty_run_has_no_figures_but_no_error(tmp_path):
    got = summarize(tmp_path)
    assert (got.steps, got.swaps, got.rollouts, got.gap_ms, got.reward_last) == (0, 0, None, None, None)
    assert summary_text.table(got) == "", "a table of dashes would only hide why it has ended"


def test_a_run_without_a_step_has_the_counts_of_its_launcher(run, tmp_path_factory):
    """They outlive it in summary.json; where a step was taken, its line counts."""
    empty = tmp_path_factory.mktemp("empty")
    counted = {"groups_failed": {"reward error: KeyError": 114}, "groups_dropped": {}, "rollouts_dropped": {}}
    got = summarize(empty, counted)
    assert (got.steps, got.groups_failed) == (0, {"reward error: KeyError": 114})
    assert summary_text.table(got) == "groups failed  114 reward error: KeyError"
    assert summarize(empty).groups_failed == {}
    summary.write(empty, got)
    assert summarize(empty).groups_failed == {"reward error: KeyError": 114}
    assert summarize(run, counted).groups_failed == {"actor lost": 1}
    (empty / summary.SUMMARY_FILE).write_text("{")
    assert summarize(empty).groups_failed == {}


def test_rollouts_that_were_not_recorded_are_not_counted_as_none(run):
    (run / ROLLOUTS_FILE).unlink()
    got = summarize(run)
    assert (got.rollouts, got.aborted, got.retried, got.tokens, got.mixed_rollouts, got.max_versions) == (None,) * 6
    text = summary_text.table(got)
    assert "rollouts         none recorded, groups failed: 1 actor lost" in text
    assert "0 aborted" not in text
    assert "sampled" not in text


def test_a_torn_rollout_stream_is_reported(run):
    file = run / ROLLOUTS_FILE
    file.write_bytes(file.read_bytes() + b"\x10")
    got = summarize(run)
    assert got.rollouts == 4
    assert got.torn_tail is not None
    assert got.torn_tail in summary_text.table(got)


def test_a_reward_that_is_not_a_number_does_not_hide_the_others(tmp_path):
    phases = ("wait_s", "train_s", "publish_wait_s", "pack_s")
    with JsonLines(tmp_path / METRICS_FILE) as metrics:
        for reward in (1.0, float("nan"), 3.0):
            metrics.write({"reward": reward, "time_s": 1.0} | dict.fromkeys(phases, 0.0))
    assert summarize(tmp_path).reward_first == 2.0
