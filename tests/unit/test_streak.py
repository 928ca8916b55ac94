"""How long an actor continues when all groups fail."""

from inflight.actor.streak import Streak


def test_a_streak_slows_down_with_time_and_then_starts_one_group_at_a_time():
    streak = Streak(give_up_after_s=300)
    assert streak.room(0, 64) == 64
    for _ in range(25):  # as fast as they fail: prompts that are too long, say
        assert streak.failed(100.0, outage=False) <= 0.05
    assert (streak.room(100.0, 64), streak.room(100.1, 64)) == (0, 1)
    assert streak.failed(120.0, outage=False) == 5
    assert not streak.hopeless(399.9)
    assert streak.hopeless(400.0)
    streak.failed(401.0, outage=True)
    assert not streak.hopeless(1000.0), "what an outage hides is not known"
    streak.failed(2000.0, outage=False)
    assert not streak.hopeless(2001.0)
    streak.succeeded()
    assert streak.room(2001.0, 64) == 64
