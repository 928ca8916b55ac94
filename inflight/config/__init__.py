"""Configuration of a run: frozen dataclasses, filled by Hydra from configs/; what can be derived is a property.

A required field has no default (Hydra reports it as missing). Bad values are refused in `__post_init__` with one line.
"""

from __future__ import annotations

from inflight.config.checks import ConfigError, require
from inflight.config.evaluation import EvalConfig, EvalSampling
from inflight.config.file import as_text, load, save, schema
from inflight.config.folder import CONFIG_FILE, run_of
from inflight.config.generator import SWAPS, GeneratorConfig
from inflight.config.hosts import HostsConfig
from inflight.config.model import ModelConfig
from inflight.config.network import NetworkConfig
from inflight.config.processes import BusConfig, LaunchConfig
from inflight.config.publish import PublishConfig
from inflight.config.rewards import RewardConfig
from inflight.config.rollout import GateConfig, RolloutConfig, Sampling, TaskConfig
from inflight.config.run import SERVICES, AuditConfig, RunConfig
from inflight.config.trainer import AdvantageConfig, ObjectiveConfig, TrainerConfig

__all__ = [
    "CONFIG_FILE",
    "SERVICES",
    "SWAPS",
    "AdvantageConfig",
    "AuditConfig",
    "BusConfig",
    "ConfigError",
    "EvalConfig",
    "EvalSampling",
    "GateConfig",
    "GeneratorConfig",
    "HostsConfig",
    "LaunchConfig",
    "ModelConfig",
    "NetworkConfig",
    "ObjectiveConfig",
    "PublishConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Sampling",
    "TaskConfig",
    "TrainerConfig",
    "as_text",
    "load",
    "require",
    "run_of",
    "save",
    "schema",
]
