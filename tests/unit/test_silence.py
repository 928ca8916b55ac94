"""Whether a request without tokens is lost or waits its turn, on a made-up clock."""

from __future__ import annotations

from inflight.actor.silence import SILENT, Call, Calls

BOUND = 10.0


def test_a_request_may_take_as_long_as_tokens_come():
    calls, call = Calls(), Call(asked=0.0)
    for now in range(0, 1000, 9):
        calls.hear(call, float(now))
        assert calls.verdict(call, now + 9.0, BOUND) is None


def test_a_request_that_stops_while_others_are_served_is_stalled():
    calls, call, other = Calls(), Call(asked=0.0), Call(asked=0.0)
    calls.hear(call, 1.0)
    calls.hear(other, 11.0)
    assert calls.verdict(call, 11.0, BOUND) is None
    assert calls.verdict(call, 11.5, BOUND) == "stalled"
    assert calls.verdict(other, 11.5, BOUND) is None


def test_a_generator_that_serves_no_request_is_silent_however_young_the_request():
    calls, old, young = Calls(), Call(asked=0.0), Call(asked=8.0)
    calls.hear(old, 1.0)
    assert calls.verdict(old, 11.5, BOUND) == SILENT
    assert calls.verdict(young, 11.5, BOUND) is None
    assert calls.verdict(young, 18.5, BOUND) == SILENT


def test_a_request_waits_in_the_queue_for_as_long_as_those_before_it_are_served():
    calls, first, queued, later = Calls(), Call(asked=0.0), Call(asked=1.0), Call(asked=12.0)
    for now in range(100):
        calls.hear(first, float(now))
        assert calls.verdict(queued, float(now), BOUND) is None
    calls.hear(later, 100.0)
    assert calls.verdict(queued, 100.0, BOUND) == "passed over"
    assert calls.verdict(Call(asked=3.0), 100.0, BOUND) is None, "asked at about the same time as the one that began"
