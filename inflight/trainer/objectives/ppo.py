"""PPO's clipped objective and its descendants, which differ in their clip and in the weight of a token."""

from __future__ import annotations

from inflight.trainer.objectives.base import Terms, TokenLoss, clip, prefers, ratio


@prefers(normalise="token")
def ppo(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """`loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`, `r = p / p_behave` (arXiv 1707.06347, eq. 7).

    The ratio corrects for both a token's staleness and the difference between the two implementations.
    """
    return TokenLoss(*clip(ratio(terms.log_ratio), terms.advantages, clip_low, clip_high))


@prefers(normalise="sequence")
def grpo(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """PPO's clip; each sequence has the same weight, whatever its length (arXiv 2402.03300, eq. 3).

    GRPO's advantage is `group_std`, its divergence from the reference `trainer.objective.kl` with estimator k3.
    """
    return ppo(terms, clip_low=clip_low, clip_high=clip_high)


@prefers(normalise="constant")
def dr_grpo(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """PPO's clip; sums over tokens divided by a constant, so that length has no influence (arXiv 2503.20783).

    Dr. GRPO's advantage is `group_mean`.
    """
    return ppo(terms, clip_low=clip_low, clip_high=clip_high)


@prefers(normalise="token")
def dapo(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.28) -> TokenLoss:
    """PPO's clip with a higher upper bound; every token of the step has the same weight (arXiv 2503.14476).

    DAPO's dynamic sampling is the gate's rule `uniform_rewards`, its advantage `group_std`.
    """
    return ppo(terms, clip_low=clip_low, clip_high=clip_high)
