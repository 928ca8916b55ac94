"""The configuration of one run: its sections, what must fit together, and what follows from it: names, addresses,
files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from inflight.config.checks import ConfigError, require
from inflight.config.evaluation import EvalConfig
from inflight.config.generator import GeneratorConfig
from inflight.config.hosts import HostsConfig
from inflight.config.model import ModelConfig
from inflight.config.network import NetworkConfig, joined
from inflight.config.processes import BusConfig, LaunchConfig
from inflight.config.publish import PublishConfig
from inflight.config.rewards import RewardConfig, require_rewards
from inflight.config.rollout import GateConfig, RolloutConfig, TaskConfig
from inflight.config.trackers import require_known
from inflight.config.trainer import TrainerConfig

SERVICES = ("weights", "rollouts", "status", "ranks", "eval", "join")
"""Control sockets, in the order of their ports."""


@dataclass(frozen=True)
class AuditConfig:
    """What the run stores for `inflight audit`."""

    keep_versions: bool = False


@dataclass(frozen=True)
class RunConfig:
    """One run: the configuration that the launcher gives to its processes (as resolved YAML in the run folder)."""

    model: ModelConfig
    task: TaskConfig
    run_dir: str
    seed: int = 0
    resume: bool = False
    """Resume the run in `run_dir` from its newest checkpoint."""
    checkpoint: str = ""
    """The checkpoint from which this start of the run resumes; set by the launcher, empty: from the beginning."""
    chosen: list[str] | None = None
    """Dotted names of the values that the user has set, on the command line or in a configuration file; all others are
    defaults. Set by the launcher (launcher/chosen.py); None: unknown, as in a configuration made in Python."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
    """How completions are scored: a weighted sum; empty: by the task's own score alone (docs/rewards.md)."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trackers: list[str] = field(default_factory=list)
    """Where figures are shown, too: `tensorboard`, `wandb`, `mlflow` (docs/metrics.md)."""
    tracker_project: str = "inflight"
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        require(bool(self.run_dir.strip()), "run_dir", self.run_dir, "a folder; leave it out for a new one in runs")
        require(0 <= self.seed < 1 << 32, "seed", self.seed, "0 to 4294967295, as numpy's generator takes it")
        limit = self.generator.max_model_len - 1  # a prompt has at least one token
        if self.trainer.synchronous:
            require(self.gate.max_lag == 0, "gate.max_lag", self.gate.max_lag, "0 with trainer.synchronous")
        fits = self.rollout.max_tokens <= limit
        require(fits, "rollout.max_tokens", self.rollout.max_tokens, f"below generator.max_model_len: {limit} or less")
        asked = self.rollout.max_prompt_tokens
        allowed = f"below generator.max_model_len: {limit} or less"
        require(asked <= limit, "rollout.max_prompt_tokens", asked, allowed)
        budget = self.trainer.micro_batch_tokens
        allowed = f"0, or {limit + 1} (generator.max_model_len) or more: a sequence has to fit"
        require(not 0 < budget <= limit, "trainer.micro_batch_tokens", budget, allowed)
        reached = not self.hosts.elsewhere or bool(self.network.bind)
        allowed = "local, or with network.bind, an address at which other hosts reach this one"
        require(reached, "hosts.starter", self.hosts.starter, allowed)
        first, last = self.network.span
        control = self.bus.port + len(SERVICES) - 1
        clear = not self.network.bind or last < self.bus.port or first > control
        allowed = f"without the ports of the control sockets, {self.bus.port} to {control} (bus.port)"
        require(clear, "network.ports", self.network.ports, allowed)
        require_rewards(self.rewards)
        self._require_scores()
        require_known(self.trackers)
        for kind, most in (("generator", self.hosts.most_generators), ("actor", self.hosts.most_actors)):
            count = self.count_of(kind)
            require(most == 0 or most >= count, f"hosts.most_{kind}s", most, f"0, or at least the configured {count}")
        self.eval.require_fits(limit, self.generator.count, self.trainer)
        sequences = self.trainer.groups_per_step * self.rollout.group_size
        ranks = self.trainer.processes
        parts = self.trainer.updates_per_batch
        require(ranks <= sequences, "trainer.processes", ranks, f"a step has {sequences} sequences to share out")
        allowed = f"a step has {sequences} sequences, and each of {ranks} trainer processes needs one for each update"
        require(parts * ranks <= sequences, "trainer.updates_per_batch", parts, allowed)

    def _require_scores(self) -> None:
        """A failed score that counts as 0 is only a reward; some of the trainer's settings need more."""
        needs = {
            "trainer.advantage.name=distillation": self.trainer.advantage.name == "distillation",
            "trainer.advantage.name=process": self.trainer.advantage.name == "process",
            "trainer.objective.kl_reference=teacher": self.trainer.objective.kl_reference == "teacher",
        }
        needing = next((name for name, needed in needs.items() if needed), None)
        fits = self.rollout.on_reward_failure != "zero" or needing is None
        require(
            fits, "rollout.on_reward_failure", "zero", f"drop or retry with {needing}, which needs more than a reward"
        )

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run_dir)

    @property
    def start_version(self) -> int:
        """The version that all processes start with: 0, or the step of the checkpoint from which the run resumes."""
        return int(Path(self.checkpoint).name.removeprefix("step-")) if self.checkpoint else 0

    @property
    def start_model(self) -> str:
        """The weights of `start_version`: a name or a directory for `models.prepare`."""
        return self.model.name if self.trainer.adapter else self.checkpoint or self.model.name

    @property
    def capacity(self) -> int:
        """Groups that may be in flight or buffered at once, computed from `max_lag` and the step size."""
        return (self.gate.max_lag + 1) * self.trainer.groups_per_step

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: one token of the completion fits after it."""
        room = self.generator.max_model_len - 1
        return min(self.rollout.max_prompt_tokens or room, room)

    @property
    def together_from(self) -> int:
        """Tokens of a prompt from which on a group's samples go to one generator; 0: never."""
        return self.rollout.together_from_tokens if self.generator.prefix_caching else 0

    @property
    def request_seed(self) -> int | None:
        """What the sampling seeds of requests are derived from; None: requests have no seed."""
        again = self.gate.on_stale == "retry" and not self.trainer.synchronous
        return self.seed if self.rollout.seeds == "always" or (self.rollout.seeds == "auto" and again) else None

    def generator_names(self) -> list[str]:
        """`g0`, `g1`, …: the names of generators in messages, metrics and rollouts."""
        return [f"g{i}" for i in range(self.generator.count)]

    def count_of(self, kind: str) -> int:
        """How many generators or actors are configured."""
        return self.generator.count if kind == "generator" else self.rollout.actors

    def most_of(self, kind: str) -> int:
        """How many generators or actors may be there at once."""
        most = self.hosts.most_generators if kind == "generator" else self.hosts.most_actors
        return max(most, self.count_of(kind))

    def is_generator(self, name: str) -> bool:
        """Whether a generator of the run may have this name; those that are admitted later are numbered on."""
        named = re.fullmatch(r"g(0|[1-9][0-9]{0,5})", name)
        further = self.most_of("generator") > self.generator.count
        return named is not None and (further or int(named[1]) < self.generator.count)

    def rank_names(self) -> list[str]:
        """`trainer` and its further processes `trainer.1`, `trainer.2`, …"""
        return ["trainer", *(f"trainer.{rank}" for rank in range(1, self.trainer.processes))]

    def endpoint(self, service: str) -> str:
        """Where processes connect for `weights`, `rollouts`, `ranks`, `eval` or `status`. Kept short: the path of a
        Unix socket has at most 107 bytes."""
        if host := self.bus.address or (self.network.bind and self.network.reached):
            return f"tcp://{joined(host, self.bus.port + SERVICES.index(service))}"
        return f"ipc://{(self.path / 'bus').resolve() / service}"

    def listening(self, service: str) -> str:
        """Where the process that has this control socket listens."""
        if self.network.bind:
            return f"tcp://{joined(self.network.bind, self.bus.port + SERVICES.index(service))}"
        return self.endpoint(service)

    @property
    def over_tcp(self) -> bool:
        """Whether control sockets are of TCP: other hosts can reach them or, on loopback, other users."""
        return bool(self.bus.address or self.network.bind)

    @property
    def api_key_file(self) -> Path:
        """The secret of this start of the run, which generators require in requests."""
        return self.path / "bus" / "api.key"

    def api_key(self) -> str:
        """That secret; empty if no launcher made one, and then none is required. Raises ConfigError for a damaged
        file."""
        try:
            key = self.api_key_file.read_bytes().removesuffix(b"\n")
        except FileNotFoundError:
            return ""
        if re.fullmatch(rb"[A-Za-z0-9_-]{32,128}", key) is None:  # it goes into an HTTP header
            raise ConfigError(f"{self.api_key_file} holds no key as the launcher makes them: damaged")
        return key.decode()

    def version_file(self, version: int) -> Path:
        """File with the weights of a version in their wire dtype (audit.keep_versions)."""
        return self.path / "versions" / f"{version:06d}.safetensors"

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs; launcher/log_files.py bounds them."""
        return self.path / "logs"

    @property
    def snapshot_file(self) -> Path:
        """The latest values of the run's processes (view/snapshot.py), replaced atomically."""
        return self.path / "bus" / "status.json"

    @property
    def routes_file(self) -> Path:
        """Which generators get requests, and their URLs: types.Routes as JSON, replaced atomically."""
        return self.path / "bus" / "routes.json"
