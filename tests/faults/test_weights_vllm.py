"""Faults in the middle of a version's bytes with a real vLLM on CPU: the trainer dies or is stopped, one of
two generators dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import Serving
from transactions import generator_killed, trainer_killed, trainer_stopped

from inflight.config import BusConfig, GeneratorConfig, ModelConfig, PublishConfig, RunConfig, TaskConfig

pytestmark = [pytest.mark.faults, pytest.mark.vllm]


def serve(folder: Path, generators: int, transfer_timeout_s: float = 15) -> Serving:
    """Real engines of the tiny model, and no trainer yet."""
    return Serving(
        RunConfig(
            model=ModelConfig("tiny", dtype="float32"),
            task=TaskConfig("addition"),
            run_dir=str(folder / "run"),
            generator=GeneratorConfig(
                count=generators,
                kv_cache_gib=0.125,
                max_num_seqs=16,
                max_model_len=1100,
                extra={"stream_interval": 1},  # the gaps between tokens are looked at
            ),
            bus=BusConfig(heartbeat_s=0.3, dead_after_s=10),
            publish=PublishConfig(
                bucket_bytes=1 << 18, transfer_timeout_s=transfer_timeout_s, commit_timeout_s=20, supersede_after_s=1
            ),
        )
    )


def test_a_trainer_killed_during_a_transfer_changes_nothing_and_its_successor_continues(tmp_path):
    with serve(tmp_path, 1) as serving:
        trainer = serving.trainer(0, "gloo")
        trainer.committed(g0=0)
        trainer.publish(1)
        trainer.committed(g0=1)
        figures, _ = trainer_killed(serving, 1, "gloo", then="gloo", many=2)
    print(json.dumps(figures))
    assert figures["fault_steps_ms"]["many"] > 0


def test_a_trainer_suspended_during_a_transfer_times_out_and_continues_when_resumed(tmp_path):
    with serve(tmp_path, 1, transfer_timeout_s=4) as serving:
        trainer = serving.trainer(0, "gloo")
        trainer.committed(g0=0)
        trainer.publish(1)
        trainer.committed(g0=1)
        figures = trainer_stopped(serving, 1, "gloo", many=2)
    print(json.dumps(figures))
    assert figures["fault_steps_ms"]["many"] > 0


def test_one_of_two_generators_killed_during_a_transfer_delays_no_other(tmp_path):
    with serve(tmp_path, 2) as serving:
        trainer = serving.trainer(0, "gloo")
        trainer.committed(g0=0, g1=0)
        figures = generator_killed(serving, 0, "gloo", many=2)
    print(json.dumps(figures))
    # The first fails, or is superseded by the second where that is published before its transfer has failed.
    assert {(name, version) for name, version, *_ in figures["missed"]} == {("g1", 3), ("g1", 4)}
