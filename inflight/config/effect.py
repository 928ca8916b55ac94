"""Options without an effect in the configured run. One that the user has set is refused, because the user expects an
effect; a default without effect is accepted.

Options of functions by name (objectives, advantages, rules) are refused where the functions are known: named.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.config import ConfigError, RunConfig


@dataclass(frozen=True)
class Idle:
    """Options, by dotted name, that have no effect when `when` holds; `because` is the reason."""

    names: str
    when: Callable[[RunConfig], bool]
    because: str


IDLE = (
    Idle(
        "trainer.objective.kl_cap trainer.objective.kl_estimator trainer.objective.kl_reference",
        lambda run: not run.trainer.objective.kl,
        "trainer.objective.kl is 0",
    ),
    Idle(
        "trainer.micro_batch",
        lambda run: run.trainer.micro_batch_tokens > 0,
        "trainer.micro_batch_tokens says how large a micro-batch is",
    ),
    Idle(
        "trainer.lora.alpha trainer.lora.rslora trainer.lora.target_modules trainer.lora.name",
        lambda run: not run.trainer.lora.rank,
        "trainer.lora.rank is 0: all weights are trained",
    ),
    Idle("generator.swap", lambda run: bool(run.trainer.adapter), "adapters have one way to swap"),
    Idle("trainer.rank_timeout_s", lambda run: run.trainer.processes == 1, "trainer.processes is 1"),
    Idle("rollout.kept_tokens", lambda run: not run.rollout.cuts, "rollout.top_p, top_k and min_p exclude no tokens"),
    Idle("rollout.together_from_tokens", lambda run: run.most_of("generator") == 1, "there is one generator"),
    Idle(
        "generator.share_prefix_across_versions rollout.together_from_tokens",
        lambda run: not run.generator.prefix_caching,
        "generator.prefix_caching is false",
    ),
    Idle("rollout.file_mib", lambda run: not run.rollout.keep, "rollout.keep is false"),
    Idle(
        "gate.max_token_lag gate.on_stale gate.stale_retries",
        lambda run: run.trainer.synchronous,
        "with trainer.synchronous no token is stale",
    ),
    Idle(
        "audit.keep_versions",
        lambda run: run.audit.keep_versions and not _auditable(run),
        "an audit needs rollout.keep, and replays no penalties and no code of the model's own",
    ),
    Idle("gate.stale_retries", lambda run: run.gate.on_stale == "drop", "gate.on_stale is drop"),
    Idle(
        "eval.at_start eval.training_requests eval.keep_best eval.best_by",
        lambda run: not run.eval.every,
        "eval.every is 0",
    ),
    Idle("eval.best_by", lambda run: not run.eval.keep_best, "eval.keep_best is false"),
    Idle("tracker_project", lambda run: not run.trackers, "trackers is empty"),
    Idle("bus.port", lambda run: not run.over_tcp, "without network.bind and bus.address all sockets are files"),
    Idle("bus.address", lambda run: bool(run.network.bind), "control sockets listen on network.bind"),
    Idle("hosts.ssh", lambda run: run.hosts.starter != "ssh", "hosts.starter is not ssh"),
    Idle(
        "hosts.names hosts.actors hosts.python hosts.lease_s",
        lambda run: run.hosts.starter not in ("ssh", "ray"),
        "hosts.starter is neither ssh nor ray",
    ),
    Idle("hosts.ray", lambda run: run.hosts.starter != "ray", "hosts.starter is not ray"),
    Idle(
        "hosts.ray_placement_timeout_s",
        lambda run: not run.hosts.by_ray,
        "only with hosts.starter=ray, and without hosts.names and hosts.actors, Ray chooses the nodes",
    ),
    Idle(
        "hosts.actors_join hosts.most_generators",
        lambda run: run.hosts.starter != "join",
        "hosts.starter is not join",
    ),
    Idle("hosts.most_actors", lambda run: not run.hosts.actors_join, "hosts.actors_join is false"),
    Idle("launch.restart_delay_s", lambda run: run.launch.restarts == 0, "launch.restarts is 0"),
)


def _auditable(run: RunConfig) -> bool:
    return run.rollout.keep and not run.rollout.penalises and not run.model.trust_remote_code


def require_effect(run: RunConfig) -> None:
    """Raises ConfigError that names a value that was set (`RunConfig.chosen`) and has no effect, and the reason."""
    for idle in IDLE:
        for name in idle.names.split():
            if name in (run.chosen or ()) and idle.when(run):
                raise ConfigError(f"{name} is set and has no effect: {idle.because}")
