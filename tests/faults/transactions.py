"""Faults in the middle of a version's bytes, on generators of a real vLLM: the same on CPU and GPUs (not a test file).

Odd and even versions are two sets of weights (publishing.py), so what an engine says tells which one it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import Serving, Streams, TrainerProcess, until

QUIET_S = 3.0
WATCH_S = 3.0
HALT_AFTER = 3
"""Buckets (gloo, nccl) or pieces of a rank (ipc) that are through when it stops."""
LOGPROB = 1e-4
"""As far apart as log-probabilities of the same weights may be, a sequence alone: kernels may choose another order."""


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether an engine said the same twice, but for the version that it said it under."""
    return all(
        tokens == others and max(abs(a - b) for a, b in zip(logprobs, other_logprobs, strict=True)) <= LOGPROB
        for (tokens, logprobs, _), (others, other_logprobs, _) in zip(one, other, strict=True)
    )


def recorded(state: dict[str, Any], name: str, version: int) -> dict[str, Any] | None:
    """The publisher's state if it has the record of a commit: the engine's figures come after the ranks' reports."""
    swaps = [(event["generator"], event["version"]) for kind, event in state["events"] if kind == "Swap"]
    return state if (name, version) in swaps else None


def versions(said: list[Any]) -> set[int]:
    """Those that the tokens carry."""
    return {version for _, _, spans in said for _, version in spans}


class Halt:
    """Stops the bytes on their way to a generator: in the trainer between two buckets or, where ranks pull them, in the
    generator between two pieces."""

    def __init__(self, serving: Serving, trainer: TrainerProcess, name: str, transport: str) -> None:
        self._trainer, self._name = trainer, name
        self._pulled = transport == "ipc"
        self._files = {what: Path(serving.config.run_dir) / f"{name}.{what}" for what in ("halt", "halted", "go")}

    def publish(self, version: int) -> None:
        """Returns when the bytes have stopped."""
        if self._pulled:
            for file in self._files.values():
                file.unlink(missing_ok=True)
            self._files["halt"].write_text(str(HALT_AFTER))
            self._trainer.publish(version)
            until(self._files["halted"].exists, "the halt in the generator")
        else:
            self._trainer.publish(version, **{self._name: HALT_AFTER})
            assert self._trainer.halted.get(timeout=60) == self._name

    def go(self) -> None:
        """Forwards the bytes again, if the sender still lives."""
        if self._pulled:
            self._files["go"].touch()
        elif self._trainer.runs:
            self._trainer.ask("go")


def gaps(serving: Serving, streams: Streams, quiet: float, end: float) -> dict[str, Any]:
    """Milliseconds between g0's steps, and between tokens at its clients: for a while until the version was published,
    and from then on."""
    windows = {"quiet": (quiet - QUIET_S / 2, quiet), "fault": (quiet, end)}
    found = {f"{what}_steps_ms": serving.steps("g0", *window) for what, window in windows.items()}
    return found | {f"{what}_clients_ms": streams.during(*window) for what, window in windows.items()}


@dataclass(frozen=True)
class Broken:
    """g0 held a version when its trainer came to harm within the next one; it decodes on."""

    held: list[Any]
    """What it said before."""
    streams: Streams
    halt: Halt
    quiet: float
    """When the next version was published."""
    harmed: float
    reported: float
    """When the rank said that it has failed to receive it."""
    reason: str

    def figures(self, serving: Serving, transport: str, end: float) -> dict[str, Any]:
        told = {"reported_after_s": round(self.reported - self.harmed, 2), "reason": self.reason[-200:]}
        return {"transport": transport, **told, **gaps(serving, self.streams, self.quiet, end)}


def broken(
    serving: Serving, version: int, transport: str, many: int, harm: Callable[[TrainerProcess], float]
) -> Broken:
    """g0 holds `version` of the newest trainer, which `harm` comes to within the next one, until the rank has given up;
    `many` sequences decode."""
    trainer, url = serving.trainers[-1], serving.url("g0")
    held = serving.says(url)
    assert versions(held) == {version}
    streams = Streams(url, many, 1000)
    time.sleep(QUIET_S)
    quiet = time.monotonic()
    failed = serving.told("g0", f"version {version + 1} failed in receive")
    halt = Halt(serving, trainer, "g0", transport)
    halt.publish(version + 1)
    harmed = harm(trainer)
    halt.go()
    reason = until(failed, "the rank's report", serving.config.publish.transfer_timeout_s + 10)
    return Broken(held, streams, halt, quiet, harmed, time.monotonic(), reason)


def holds_still(serving: Serving, version: int, held: list[Any]) -> None:
    """The live weights are as they were."""
    still = serving.says(serving.url("g0"))
    assert same(still, held), "the live weights are as they were"
    assert versions(still) == {version}


def goes_on(serving: Serving, trainer: TrainerProcess, version: int, held: list[Any]) -> None:
    """g0, which said `held` before, has the other set of weights with `version`, and the first again with the next."""
    url = serving.url("g0")
    said = serving.says(url)
    assert not same(said, held)
    assert versions(said) == {version}
    trainer.publish(version + 1)
    trainer.committed(g0=version + 1)
    assert same(serving.says(url), held)


def trainer_killed(
    serving: Serving, version: int, transport: str, then: str, many: int
) -> tuple[dict[str, Any], TrainerProcess]:
    """g0 holds `version` of the newest trainer, which is killed within the next one; a new one, which sends by `then`,
    takes its place; `many` sequences decode. The figures, and the new trainer."""
    fault = broken(serving, version, transport, many, TrainerProcess.kill)
    time.sleep(max(0.0, fault.harmed + WATCH_S - fault.reported))
    end = time.monotonic()
    fault.streams.end_well()
    holds_still(serving, version, fault.held)
    trainer = serving.trainer(version, then)
    trainer.committed(g0=version)
    trainer.publish(version + 1)
    trainer.committed(g0=version + 1)
    goes_on(serving, trainer, version + 1, fault.held)
    return fault.figures(serving, transport, end), trainer


def trainer_stopped(serving: Serving, version: int, transport: str, many: int) -> dict[str, Any]:
    """g0 holds `version` of the newest trainer, which is stopped within the next one until the rank has given up, and
    continues; `many` sequences decode."""
    trainer = serving.trainers[-1]
    fault = broken(serving, version, transport, many, TrainerProcess.stop)
    holds_still(serving, version, fault.held)
    trainer.resume()
    fault.halt.go()
    trainer.committed(g0=version + 1)
    end = time.monotonic()
    fault.streams.end_well()
    goes_on(serving, trainer, version + 1, fault.held)
    return fault.figures(serving, transport, end) | {"healed_after_s": round(end - fault.reported, 2)}


def generator_killed(serving: Serving, version: int, transport: str, many: int) -> dict[str, Any]:
    """g0 and g1 hold `version`, which their trainer began with, and get two more. g1 is killed within the next one,
    which g0 gets; then it is started again. With the two more, all transports are formed beside decoding."""
    trainer, url = serving.trainers[-1], serving.url("g0")
    held, processes = serving.says(url), {name: process.pid for name, process in serving.processes.items()}
    streams = Streams(url, many, 1000)
    time.sleep(QUIET_S)
    forming, begun = time.monotonic(), version
    while version < begun + 2:
        version += 1
        trainer.publish(version)
        trainer.committed(g0=version, g1=version)
    time.sleep(QUIET_S)
    quiet = time.monotonic()
    halt = Halt(serving, trainer, "g1", transport)
    halt.publish(version + 1)
    killed = serving.kill("g1")
    halt.go()
    trainer.committed(g0=version + 1)
    committed = time.monotonic()
    trainer.lost("g1", serving.config.bus.dead_after_s)
    trainer.publish(version + 2)
    state = trainer.committed(g0=version + 2)
    assert "g1" not in state["committed"]
    time.sleep(max(0.0, killed + WATCH_S - time.monotonic()))
    end = time.monotonic()
    streams.end_well()
    assert same(serving.says(url), held)
    serving.start("g1")
    trainer.committed(g0=version + 2, g1=version + 2)
    back = serving.says(serving.url("g1"))
    assert same(back, held)
    assert versions(back) == {version + 2}, "not what it was started with"
    trainer.publish(version + 3)
    trainer.committed(g0=version + 3, g1=version + 3)
    assert same(serving.says(serving.url("g1")), serving.says(url))
    assert serving.processes["g0"].pid == processes["g0"], "the survivor was not started again"
    state = until(lambda: recorded(trainer.ask("state"), "g0", version + 3), "the record of the last version")
    mine = [event["version"] for kind, event in state["events"] if kind == "Swap" and event["generator"] == "g0"]
    assert mine == list(range(begun, version + 4)), "the survivor got every version"
    return {
        "transport": transport,
        "survivor_committed_after_s": round(committed - killed, 2),
        "killed_s": round(killed - quiet, 3),
        "forming_steps_ms": serving.steps("g0", forming, quiet),
        "senders_s": [
            [name, what, round(began - quiet, 3), round(ended - quiet, 3)]
            for name, what, began, ended in state["spans"]
            if quiet <= ended <= end
        ],
        "missed": [
            [event["generator"], event["version"], event.get("phase", "superseded"), event["reason"][:200]]
            for kind, event in state["events"]
            if kind in ("Failure", "Superseded")
        ],
        **gaps(serving, streams, quiet, end),
    }
