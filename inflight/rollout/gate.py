"""The gate: how stale tokens may be used, decided when a batch is taken. Pure functions, no clock, no state.

A group passes through rules (rules.py), one after the other; by default:

1. token: `lag = version now - version that sampled it`; above `max_token_lag` the token is masked. It is excluded from
   the loss but stays in the sequence, as context of the following tokens.
2. sequence: dropped when no token is left, or when the unmasked share is below `min_trained_share`.
3. the rules in `gate.rules`, in their order.
4. group: dropped when fewer than two usable sequences are left (an advantage relative to nothing is undefined).

A group with a token of a version that was never published is dropped before all rules. The greatest possible lag is
bounded by how much the buffer admits (`gate.max_lag`).

The baseline of a kept group uses the rewards of *all* its members, including dropped ones: they answer the same prompt,
and their rewards are as valid as any. Excluding them would favour short completions, because the long ones become
stale. So advantages are computed from `GatedGroup.rewards`, and only `GatedGroup.rollouts` are trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from inflight.arrays import Flags, Lags
from inflight.config import GateConfig
from inflight.named import of_entry
from inflight.rollout import rules
from inflight.rollout.gate_result import GatedGroup, GatedRollout, GroupDrop, SequenceDrop
from inflight.types import Rollout, RolloutGroup, version_array

__all__ = ["GatedGroup", "GatedRollout", "GroupDrop", "SequenceDrop", "gate_group", "rules_of", "token_lags"]

MIN_GROUP = 2
"""Fewest sequences of a group for a relative advantage."""

Rule = Callable[[GatedGroup], GatedGroup]


def token_lags(rollout: Rollout, version: int) -> Lags:
    """[T] number of versions by which each token is behind `version`; negative for a version not published yet.

    Raises ValueError when the spans do not fit the tokens.
    """
    turn = rollout.turn
    return Lags(version - version_array(turn.token_versions, len(turn.token_ids)))


def rules_of(config: GateConfig) -> list[Rule]:
    """The configured rules. Raises ConfigError that names an unknown rule or option."""
    return [of_entry(each, rules.RULES, f"gate.rules[{index}]") for index, each in enumerate(config.rules)]


def gate_group(group: RolloutGroup, version: int, config: GateConfig) -> GatedGroup:
    """Applies all rules to one group at trainer version `version`. Raises ValueError when spans do not fit tokens."""
    gated = _ungated(group, version)
    blamed = list[str]()
    for name, rule in _chain(config):
        if gated.dropped is not None:
            break
        before, gated = gated, rule(gated)
        if _did(before) != _did(gated):
            blamed.append(name)
    return replace(gated, rules=tuple(blamed))


def _did(gated: GatedGroup) -> tuple[object, ...]:
    return gated.dropped, gated.members_dropped, gated.masked, len(gated.rollouts)


def _ungated(group: RolloutGroup, version: int) -> GatedGroup:
    if any(span.version > version for rollout in group.rollouts for span in rollout.turn.token_versions):
        return GatedGroup(group, version, [], GroupDrop.UNPUBLISHED, {})
    members = []
    for rollout in group.rollouts:
        lags = token_lags(rollout, version)
        members.append(GatedRollout(rollout, Flags(np.ones(len(lags), bool)), lags))
    return rules.drop_members(
        GatedGroup(group, version, members, None, {}), lambda member: not member.lags, SequenceDrop.EMPTY
    )


def _chain(config: GateConfig) -> list[tuple[str, Rule]]:
    """The rules in their order, each with the option that configures it."""
    lag = config.max_token_lag
    share = config.min_trained_share
    own = [f"gate.rules[{index}] ({each['name']})" for index, each in enumerate(config.rules)]
    return [
        (f"gate.max_token_lag={lag}", lambda group: rules.token_lag(group, at_most=lag)),
        (f"gate.min_trained_share={share:g}", lambda group: rules.trained_share(group, at_least=share)),
        *zip(own, rules_of(config), strict=True),
        (
            "at least one token in each rollout",
            lambda group: rules.drop_members(group, lambda member: not member.mask.values.any(), SequenceDrop.STALE),
        ),
        (f"at least {MIN_GROUP} rollouts", lambda group: rules.smallest_group(group, at_least=MIN_GROUP)),
    ]
