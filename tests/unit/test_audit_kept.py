"""Which kept sets the audit takes from a record: those that rounding explains."""

import pytest
import torch

from inflight.audit.kept import plausible
from inflight.config import Sampling
from inflight.sampling import Recorded, processed_logprobs

SLACK = 1e-4
OPTIONS = [
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 8, "top_p": 0.7, "temperature": 1.4},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.95, "temperature": 0.6},
]


def draws(sampling, many=300, vocabulary=50, seed=0):
    """(logits as a replay has them, what an engine recorded whose logits are off by rounding)."""
    noise = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((many, vocabulary), generator=noise)
    engine = processed_logprobs(logits + SLACK / 10 * torch.randn(logits.shape, generator=noise), sampling)
    sets = [row.isfinite().nonzero()[:, 0] for row in engine]
    chosen = engine.exp().multinomial(1, generator=noise)[:, 0]
    return logits, Recorded(chosen, padded(sets))


def padded(sets):
    return torch.nn.utils.rnn.pad_sequence(sets, batch_first=True, padding_value=-1)


def used(logits, sampling, recorded):
    """[N] whether the record's set is used."""
    return (plausible(logits, sampling, recorded, SLACK).kept >= 0).any(dim=1)


@pytest.mark.parametrize("options", OPTIONS)
def test_sets_that_an_engine_left_are_used(options):
    sampling = Sampling(**options)
    assert used(*reorder(draws(sampling), sampling)).all()


def reorder(made, sampling):
    return made[0], sampling, made[1]


@pytest.mark.parametrize("options", OPTIONS)
def test_other_sets_are_not_used(options):
    sampling = Sampling(**options)
    logits, recorded = draws(sampling)
    sizes = (recorded.kept >= 0).sum(dim=1)
    single = Recorded(recorded.chosen, recorded.chosen[:, None])
    assert not used(logits, sampling, single)[sizes > 1].any(), "the sampled token alone"
    least = torch.where(recorded.kept >= 0, logits.gather(1, recorded.kept.clamp(min=0)), 99.0).argmin(dim=1)
    without = recorded.kept.clone()
    without[torch.arange(len(without)), least] = -1
    clear = (sizes > 1) & (without != recorded.chosen[:, None]).any(dim=1)
    kept = used(logits, sampling, Recorded(recorded.chosen, without))
    drawn = recorded.kept[torch.arange(len(without)), least] == recorded.chosen
    assert kept[clear & ~drawn].float().mean() < 0.02, "without its least probable token"
    worst = logits.argmin(dim=1, keepdim=True)
    more = Recorded(recorded.chosen, torch.cat([recorded.kept, worst], dim=1))
    inside = (recorded.kept == worst).any(dim=1)
    assert not used(logits, sampling, more)[~inside].any(), "and the least probable token of all"


def test_a_tie_that_the_replay_does_not_see_is_as_recorded():
    """The engine kept six of five: its sixth token had the same logit as its fifth."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 1.0 - 1e-5, -3.0]])
    sampling, six = Sampling(top_k=5), torch.arange(6)[None]
    known = plausible(logits, sampling, Recorded(torch.tensor([0]), six), SLACK)
    assert torch.equal(known.kept, six)
    assert processed_logprobs(logits, sampling, known)[0].isfinite().sum() == 6


def test_what_was_not_recorded_stays_so():
    logits = torch.randn((2, 9), generator=torch.Generator().manual_seed(1))
    nothing = Recorded(torch.tensor([1, 2]))
    assert plausible(logits, Sampling(top_k=2), nothing, SLACK) is nothing
    empty = Recorded(torch.tensor([1, 2]), torch.full((2, 1), -1))
    assert not used(logits, Sampling(top_k=2), empty).any()
