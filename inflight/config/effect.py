"""Values that can't have an effect in the run that they are part of. Where a user has set one it is refused: they count
on something that will not happen. A default that has none is nobody's business.

Options of functions by name (objectives, advantages, rules) are refused where the functions are known: named.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.config import ConfigError, RunConfig


@dataclass(frozen=True)
class Idle:
    """Values, by dotted name, that have no effect when `when` holds, which `because` says."""

    names: str
    when: Callable[[RunConfig], bool]
    because: str


IDLE = (
    Idle("trainer.objective.kl_cap trainer.objective.kl_estimator trainer.objective.kl_reference",
         lambda run: not run.trainer.objective.kl, "trainer.objective.kl is 0"),
    Idle("trainer.micro_batch", lambda run: run.trainer.micro_batch_tokens > 0,
         "trainer.micro_batch_tokens says how large a micro-batch is"),
    Idle("trainer.rank_timeout_s", lambda run: run.trainer.processes == 1, "trainer.processes is 1"),
    Idle("rollout.kept_tokens", lambda run: not run.rollout.cuts,
         "rollout.top_p, top_k and min_p cut nothing off"),
    Idle("gate.max_token_lag", lambda run: run.trainer.synchronous, "with trainer.synchronous no token is old"),
    Idle("gate.stale_retries", lambda run: run.gate.on_stale == "drop", "gate.on_stale is drop"),
    Idle("generator.share_prefix_across_versions", lambda run: not run.generator.prefix_caching,
         "generator.prefix_caching is false"),
    Idle("bus.port", lambda run: not run.bus.address, "without bus.address all sockets are files"),
    Idle("launch.restart_delay_s", lambda run: run.launch.restarts == 0, "launch.restarts is 0"),
)  # fmt: skip


def require_effect(run: RunConfig) -> None:
    """Raises ConfigError naming a value that was set (`RunConfig.chosen`), can't have an effect, and why."""
    for idle in IDLE:
        for name in idle.names.split():
            if name in (run.chosen or ()) and idle.when(run):
                raise ConfigError(f"{name} is set and has no effect: {idle.because}")
