"""Every objective again, from its formula, in plain Python floats, with its gradient by hand (not a test file).

A reference takes one sequence: the log-probabilities now, when sampled, and under the proximal policy, the advantages,
and the lags of its trained tokens. It gives the loss summed over them and the derivative by each log-probability now.
"""

from __future__ import annotations

from math import exp, fsum


def clipped(r, a, low, high):
    """-min(r a, clip(r) a) and its derivative by r."""
    bounded = min(max(r, 1 - low), 1 + high)
    if r * a <= bounded * a:
        return -r * a, -a
    return -bounded * a, 0.0


def reinforce(now, then, prox, worth, lags):
    return fsum(-a * p for a, p in zip(worth, now, strict=True)), [-a for a in worth]


def ppo(now, then, prox, worth, lags, low=0.2, high=0.2):
    total, slope = 0.0, []
    for p, q, a in zip(now, then, worth, strict=True):
        r = exp(p - q)
        value, by_r = clipped(r, a, low, high)
        total += value
        slope.append(by_r * r)
    return total, slope


def dapo(*sequence):
    return ppo(*sequence, high=0.28)


def weighted(now, worth, prox, weights, low=0.2, high=0.2):
    """Sum of w * -min(u a, clip(u) a), u = exp(now - prox), with constant weights and a constant proximal policy."""
    total, slope = 0.0, []
    for p, x, a, w in zip(now, prox, worth, weights, strict=True):
        u = exp(p - x)
        value, by_u = clipped(u, a, low, high)
        total += w * value
        slope.append(w * by_u * u)
    return total, slope


def token_ratios(prox, then):
    return [exp(x - q) for x, q in zip(prox, then, strict=True)]


def decoupled(now, then, prox, worth, lags):
    return weighted(now, worth, prox, token_ratios(prox, then))


def decoupled_capped(now, then, prox, worth, lags):
    return weighted(now, worth, prox, [w if w <= 1.5 else 0.0 for w in token_ratios(prox, then)])


def decoupled_interpolated(now, then, prox, worth, lags):
    guess = []
    for p, q, lag in zip(now, then, lags, strict=True):
        alpha = (lag - 1) / lag if lag >= 1 else 0.0
        guess.append(q + alpha * (p - q))
    return weighted(now, worth, guess, token_ratios(guess, then))


def tis(now, then, prox, worth, lags):
    return weighted(now, worth, prox, [min(w, 2.0) for w in token_ratios(prox, then)])


def whole_ratio(prox, then):
    return exp(fsum(x - q for x, q in zip(prox, then, strict=True)))


def mean_ratio(prox, then):
    return exp(fsum(x - q for x, q in zip(prox, then, strict=True)) / len(then)) if then else 1.0


def tis_sequence(now, then, prox, worth, lags):
    return weighted(now, worth, prox, [min(whole_ratio(prox, then), 2.0)] * len(now))


def tis_geometric(now, then, prox, worth, lags):
    return weighted(now, worth, prox, [min(mean_ratio(prox, then), 1.1)] * len(now))


def masked_is(now, then, prox, worth, lags):
    return weighted(now, worth, prox, [w if w <= 2.0 else 0.0 for w in token_ratios(prox, then)])


def icepop(now, then, prox, worth, lags):
    return weighted(now, worth, prox, [w if 0.5 <= w <= 5.0 else 0.0 for w in token_ratios(prox, then)])


def sequence_mask(now, then, prox, worth, lags):
    w = whole_ratio(prox, then)
    return weighted(now, worth, prox, [w if w <= 2.0 else 0.0] * len(now))


def geometric_mask(now, then, prox, worth, lags):
    inside = 0.8 <= mean_ratio(prox, then) <= 1.25
    return weighted(now, worth, prox, [w if inside else 0.0 for w in token_ratios(prox, then)])


def cispo(now, then, prox, worth, lags):
    weights = [min(max(exp(p - q), 0.0), 5.0) for p, q in zip(now, then, strict=True)]
    slope = [-w * a for w, a in zip(weights, worth, strict=True)]
    return fsum(s * p for s, p in zip(slope, now, strict=True)), slope


def topr(now, then, prox, worth, lags):
    r = whole_ratio(now, then)
    slope = [-(1.0 if a >= 0 else min(r, 1.0)) * a for a in worth]
    return fsum(s * p for s, p in zip(slope, now, strict=True)), slope


def gspo(now, then, prox, worth, lags, low=3e-4, high=4e-4):
    s = mean_ratio(now, then)
    values = [clipped(s, a, low, high) for a in worth]
    by_s = fsum(slope for _, slope in values)
    return fsum(value for value, _ in values), [by_s * s / max(len(now), 1)] * len(now)


def sapo(now, then, prox, worth, lags):
    total, slope = 0.0, []
    for p, q, a in zip(now, then, worth, strict=True):
        tau, r = 1.0 if a > 0 else 1.05, exp(p - q)
        gate = 1 / (1 + exp(-tau * (r - 1)))
        total += -a * gate * 4 / tau
        slope.append(-a * 4 * gate * (1 - gate) * r)
    return total, slope


REFERENCES = {
    # name in these tests: (objective, options, reference)
    "reinforce": ("reinforce", {}, reinforce),
    "ppo": ("ppo", {}, ppo),
    "grpo": ("grpo", {}, ppo),
    "dr_grpo": ("dr_grpo", {}, ppo),
    "dapo": ("dapo", {}, dapo),
    "decoupled_ppo": ("decoupled_ppo", {}, decoupled),
    "decoupled_ppo capped": ("decoupled_ppo", {"cap": 1.5}, decoupled_capped),
    "decoupled_ppo interpolated": ("decoupled_ppo", {"proximal_by": "interpolated"}, decoupled_interpolated),
    "tis": ("tis", {}, tis),
    "tis_sequence": ("tis_sequence", {}, tis_sequence),
    "tis geometric": ("tis", {"level": "geometric", "cap": 1.1}, tis_geometric),
    "masked_is": ("masked_is", {}, masked_is),
    "icepop": ("icepop", {}, icepop),
    "sequence_mask": ("sequence_mask", {}, sequence_mask),
    "geometric_mask": ("geometric_mask", {"low": 0.8, "high": 1.25}, geometric_mask),
    "cispo": ("cispo", {}, cispo),
    "topr": ("topr", {}, topr),
    "gspo": ("gspo", {}, gspo),
    "sapo": ("sapo", {}, sapo),
}
