"""What the learning bench says of finished runs."""

from __future__ import annotations

from bench.learning_report import Curve, table


def curve(reward: list[float], step_s: float, final: float, seed: int = 0) -> Curve:
    steps = [float(step) for step in range(1, len(reward) + 1)]
    return Curve(
        seed=seed,
        steps=steps,
        seconds=[step_s * step for step in steps],
        tokens=steps,
        reward=reward,
        final=final,
        lag=0.0,
        masked=0.0,
        dropped=0,
        ess=1.0,
        sampled=1,
        versions=1.0,
        others_cpu=0.0,
    )


def test_time_is_measured_to_the_baselines_final_reward_seed_by_seed():
    baseline = [curve([0.1, 0.4, 0.5, 0.5], 10.0, 0.5), curve([0.1, 0.2, 0.3, 0.2], 10.0, 0.3, seed=1)]
    quicker = [curve([0.1, 0.3, 0.6, 0.6], 4.0, 0.6), curve([0.0, 0.1, 0.1, 0.2], 4.0, 0.2, seed=1)]
    lines = table({"baseline": baseline, "quicker": quicker}, "baseline").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    reached = cells[0].index("to the baseline's final reward, of its wall time")
    assert len(set(map(len, cells))) == 1, "a row has a cell for each heading"
    assert cells[2][reached] == "75 (75 to 75) % (2 of 2)"
    assert cells[3][reached] == "30 % (1 of 2)", "12 s of 40; the other seed never gets there"


def test_a_policy_with_fewer_seeds_is_compared_with_the_same_ones():
    baseline = [curve([0.9], 10.0, 0.9), curve([0.2], 10.0, 0.2, seed=1)]
    lines = table({"baseline": baseline, "late": [curve([0.3], 5.0, 0.3, seed=1)]}, "baseline").splitlines()
    assert "| 50 % (1 of 1) |" in lines[3]


def test_a_policy_that_never_gets_there_is_reported_as_such():
    runs = {"baseline": [curve([0.1, 0.5], 1.0, 0.5)], "worse": [curve([0.1, 0.2], 1.0, 0.2)]}
    assert "| never |" in table(runs, "baseline").splitlines()[3]


def test_a_run_whose_seed_is_missing_in_the_baseline_is_not_compared():
    runs = {"baseline": [curve([0.1, 0.5], 1.0, 0.5, seed=1)], "alone": [curve([0.9, 0.9], 1.0, 0.9)]}
    row = table(runs, "baseline").splitlines()[3]
    assert "never" not in row
    assert "| – |" in row
