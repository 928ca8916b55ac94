"""Everything that reads bytes of others: what it may raise, whole inputs to damage, and what an accepted one must hold.

A target takes bytes. Only its declared errors may come out of it; what it accepts must be the same again after it was
written and read once more, so that no garbage passes for data.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from packed_samples import framed, packed
from rollout_samples import make_config, make_group
from safetensors.torch import save
from torch import nn

from inflight import config as configuration
from inflight.arrays import from_msgpack, to_msgpack
from inflight.audit.replay import AuditError, KeptVersions
from inflight.bus import keys
from inflight.bus.allowed import AllowedKeys
from inflight.completions import RetryableFailure, Unpatched, parse_turn
from inflight.config import ConfigError
from inflight.groups import defect
from inflight.messages import (
    ActorHello,
    Commit,
    Failed,
    Grant,
    GroupDone,
    GroupFailed,
    Heartbeat,
    Ready,
    Status,
    WireError,
    decode,
    encode,
)
from inflight.metrics import METRICS_FILE, SWAPS_FILE, read_lines
from inflight.packed_logprobs import tokens_in, unpack
from inflight.report import summary, summary_text
from inflight.rollout.books import NO_BOOKS
from inflight.rollout.frames import StreamError, encode_frame
from inflight.rollout.part import start_of
from inflight.rollout.stream import Reader
from inflight.trainer.checkpoint import index, rng
from inflight.trainer.checkpoint.index import CheckpointError, Saved
from inflight.trainer.checkpoint.io import (
    MASTER_FILE,
    OPTIMIZER_FILE,
    RANDOM_FILE,
    load_master,
    load_optimizer,
    load_random,
)

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


@dataclass(frozen=True)
class Target:
    """One decoder."""

    read: Callable[[bytes], None]
    errors: tuple[type[Exception], ...]
    samples: list[bytes]


def _message(data: bytes) -> None:
    message = decode(data)
    assert decode(encode(message)) == message
    if isinstance(message, GroupDone):
        defect(message.group, 2, 100)


def _stream(data: bytes) -> None:
    path = FOLDER / "rollouts.msgpack"
    path.write_bytes(data)
    reader = Reader(path)
    groups = list(reader)
    frames = start_of(bytes(16), 0) + b"".join(map(encode_frame, groups))
    path.write_bytes(frames)
    assert list(Reader(path)) == groups


def _turn(data: bytes) -> None:
    turn = parse_turn(data, "g0")
    assert len(turn.token_ids) == len(turn.logprobs)
    encoded = msgspec.msgpack.encode(turn, enc_hook=to_msgpack)
    assert msgspec.msgpack.decode(encoded, type=type(turn), dec_hook=from_msgpack) == turn


def _packed(data: bytes) -> None:
    drawn = unpack([data, data], 3)
    assert len(drawn) == 2 * tokens_in(data)
    assert len(drawn.token_ids) == len(drawn.logprobs) == len(drawn.kept)
    assert drawn.kept.widest < 3
    for token, kept in zip(drawn.token_ids.tolist(), drawn.kept, strict=True):
        assert not kept or token in kept.tolist()


def _checkpoint(data: bytes) -> None:
    folder = FOLDER / "step-000003"
    (folder / index.STATE_FILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / index.STATE_FILE).write_bytes(data)
    saved = index.read(folder)
    assert saved.step == 3
    saved.books.settled.add(1)


def _lines(data: bytes) -> None:
    path = FOLDER / "metrics.jsonl"
    path.write_bytes(data)
    assert all(isinstance(line, dict) for line in read_lines(path))


def _config(data: bytes) -> None:
    (FOLDER / configuration.CONFIG_FILE).write_bytes(data)
    assert configuration.load(FOLDER).run_dir


def _version(data: bytes) -> None:
    path = FOLDER / "000001.safetensors"
    path.write_bytes(data)
    for tensor in KeptVersions(FOLDER).load(1).values():
        tensor.numel()


def _summary(data: bytes) -> None:
    """The first half is of the steps, the second of the swaps."""
    folder = FOLDER / "summary"
    folder.mkdir(exist_ok=True)
    steps, _, swaps = data.partition(HALVES)
    (folder / METRICS_FILE).write_bytes(steps)
    (folder / SWAPS_FILE).write_bytes(swaps)
    found = summary.summarize(folder)
    assert summary_text.table(found) or not found.steps


def _api_key(data: bytes) -> None:
    config = make_config(FOLDER)
    config.api_key_file.parent.mkdir(exist_ok=True)
    config.api_key_file.write_bytes(data)
    assert config.api_key().isascii()


def _curve_key(data: bytes) -> None:
    path = FOLDER / "keys" / "allowed" / "g0.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    assert AllowedKeys(FOLDER / "keys").owner_of(keys.public_key(FOLDER / "keys" / "allowed" / "g0.key")) == "g0"


def _optimizer(data: bytes) -> None:
    path = FOLDER / "step-000004" / OPTIMIZER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    load_optimizer(FOLDER / "step-000004", model, optimizer)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()


def _master(data: bytes) -> None:
    path = FOLDER / "step-000004" / MASTER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    load_master(FOLDER / "step-000004", nn.Linear(3, 2, bias=False))


def _random(data: bytes) -> None:
    path = FOLDER / "step-000004" / RANDOM_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    load_random(FOLDER / "step-000004")


def _config_sample() -> bytes:
    config = make_config("unused")
    with contextlib.chdir(FOLDER):
        configuration.save(config)
    return (FOLDER / "unused" / configuration.CONFIG_FILE).read_bytes()


MESSAGES = [
    Heartbeat(),
    Commit(version=3),
    Grant(questions=[1, 2]),
    ActorHello(actor="a0", incarnation="0" * 16),
    Failed(version=1, phase="build", reason="x", poisoned=False),
    Ready(version=1, attempt=1, digest="0" * 64, receive_s=0.1, build_s=0.2),
    GroupDone(group=make_group("q1")),
    GroupFailed(group_id="q1", reason="r", again=True),
    Status(source="a0", values={"x": 1, "y": 2.5, "z": "t"}),
]
ANSWER = {
    "choices": [
        {
            "finish_reason": "stop",
            "packed_logprobs": packed([1, 2], [-0.5, -1.0]),
            "token_versions": [[0, 1]],
            "prefill_versions": [[0, 0, 1]],
        }
    ]
}
HALVES = b"\n---\n"
STEP = {
    "step": 1,
    "version": 1,
    "time_s": 2.5,
    "wait_s": 1.0,
    "train_s": 0.5,
    "publish_wait_s": 0.0,
    "pack_s": 0.1,
    "reward": 0.5,
    "tokens_trained": 20,
    "tokens_masked": 0,
    "lag_counts": {"0": 20},
    "groups_dropped": {},
    "groups_failed": {"actor lost": 1},
}
SWAPS = [
    {"event": "committed", "version": 1, "gap_s": 0.001, "running": 3},
    {"event": "failed", "version": 2, "phase": "build", "reason": "x"},
]
ADAM = {"weight.step": torch.tensor(3.0), "weight.exp_avg": torch.zeros(2, 3), "weight.exp_avg_sq": torch.ones(2, 3)}


def _lines_of(*lines: dict[str, object]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _curve_sample() -> bytes:
    keys.make_keys(FOLDER / "sample", ["g0"])
    return (FOLDER / "sample" / "allowed" / "g0.key").read_bytes()


TARGETS = {
    "messages": Target(_message, (WireError,), [encode(message) for message in MESSAGES]),
    "rollouts": Target(
        _stream,
        (StreamError,),
        [start_of(bytes(16), 0) + encode_frame(make_group("q1")) + encode_frame(make_group("q2", spans=[(0, 3)]))],
    ),
    "completions": Target(_turn, (RetryableFailure, Unpatched), [json.dumps(ANSWER).encode()]),
    "packed log-probabilities": Target(
        _packed,
        (ValueError,),
        [b64decode(packed([1, 2], others=[{5: -1.0, 7: -2.0}, {6: -0.1}])), b64decode(framed([], [])), b""],
    ),
    "checkpoint": Target(
        _checkpoint,
        (CheckpointError,),
        [msgspec.json.encode(Saved(schema=index.SCHEMA, step=3, elapsed_s=1.0, books=NO_BOOKS))],
    ),
    "metrics": Target(_lines, (ValueError,), [b'{"step": 1, "reward": 0.5}\n{"step": 2}\n']),
    "config": Target(_config, (ConfigError,), [_config_sample()]),
    "version": Target(
        _version, (AuditError,), [save({"a": torch.zeros(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)})]
    ),
    "summary": Target(_summary, (ValueError,), [_lines_of(STEP) + HALVES + _lines_of(*SWAPS)]),
    "api key": Target(_api_key, (ConfigError,), [b"PGvNm0Fx1tVqvd2Yl0gk6cPSuK3m9o7eT5hXaZbW4rQ\n"]),
    "curve key": Target(_curve_key, (keys.KeysError,), [_curve_sample()]),
    "optimizer": Target(_optimizer, (CheckpointError,), [save(ADAM)]),
    "master weights": Target(_master, (CheckpointError,), [save({"weight": torch.ones(2, 3)})]),
    "random": Target(_random, (CheckpointError,), [save(rng.capture())]),
}
