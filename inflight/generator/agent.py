"""The engine's side of the weight protocol: receives Commit, has the engine core carry it out, and answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import msgspec

from inflight.bus import Arrivals, Link, PeerLost
from inflight.error_line import first_line, one_line
from inflight.messages import AnyMessage, Commit, Committed, EngineHello, Enquire, Failed, Finish, Refused
from inflight.messages.base import MAX_REASON

log = logging.getLogger(__name__)

POLL_S = 0.2


class GeneratorEnded(RuntimeError):
    """Why the generator stops serving, in one line for the user."""


class Engine(Protocol):
    """The methods of vLLM's AsyncLLM (patched) that the agent uses."""

    engine_core: Any
    output_processor: Any


def running(engine: Engine) -> int:
    """Number of unfinished requests of the engine. AsyncLLM has a public method for this only after 0.26."""
    return int(engine.output_processor.get_num_unfinished_requests())


@dataclass
class Commits:
    """What the status reports about swaps so far."""

    version: int | None
    """None: no version is committed yet, the engine has the weights that it was started with."""
    publisher: str
    """The publisher that sent that version."""
    swaps: int = 0
    gap_s: float = 0.0
    """Of the last swap: the longest stall of a rank's step loop."""
    max_gap_s: float = 0.0
    told: Callable[[float], None] | None = None
    """Called with the gap of each swap."""

    def add(self, commit: Commit, gap_s: float) -> None:
        """Records one swap."""
        self.version = commit.version
        self.publisher = commit.publisher
        self.swaps = self.swaps + 1
        self.gap_s = gap_s
        self.max_gap_s = max(gap_s, self.max_gap_s)
        if self.told is not None:
            self.told(gap_s)


@dataclass
class EngineAgent:
    """Talks to the publisher as `<generator>.engine` while the generator serves."""

    link: Link
    engine: Engine
    hello: EngineHello
    commit_timeout_s: float
    alone_timeout_s: float = 0.0
    """Seconds for which the generator keeps serving after it has lost the trainer, which may come back."""
    adapter: int = 0
    """The id of the LoRA adapter whose versions the publisher sends; 0: it sends those of all weights."""
    commits: Commits = field(init=False)
    _committed: Committed | None = field(init=False, default=None)
    """The last answer to Commit; sent again when the publisher repeats that Commit."""

    def __post_init__(self) -> None:
        self.commits = Commits(self.hello.version, self.hello.publisher)

    async def run(self) -> None:
        """Returns when the publisher announces the end of the run.

        Raises GeneratorEnded when the publisher refuses this engine, is silent for too long, or a commit failed.
        """
        arrivals = Arrivals(self.link)
        self.link.send(self.hello)
        alone_since: float | None = None
        while True:
            try:
                message = await arrivals.receive(POLL_S)
            except PeerLost as error:
                alone_since = await self._be_alone(alone_since, error)
                continue
            alone_since = None  # no PeerLost: the trainer is alive, whether or not there was a message
            if isinstance(message, Finish):
                return
            await self._obey(message)

    async def _be_alone(self, since: float | None, error: PeerLost) -> float:
        """Keeps serving without a trainer; one that comes back requests a hello. Raises GeneratorEnded after the
        timeout."""
        now = time.monotonic()
        if since is None:
            log.warning("%s; keeps serving version %s", error, self.commits.version)
            return now
        if now - since > self.alone_timeout_s:
            raise GeneratorEnded(f"the trainer is gone: {error}") from None
        await asyncio.sleep(POLL_S)
        return since

    async def _obey(self, message: AnyMessage | None) -> None:
        match message:
            case None:
                pass
            case Enquire():
                version = self.commits.version
                publisher = self.commits.publisher
                self.link.send(msgspec.structs.replace(self.hello, version=version, publisher=publisher))
            case Commit() if self._committed is not None and _answers(self._committed, message):
                self.link.send(self._committed)
            case Commit():
                await self._commit(message)
            case Refused(reason=reason):
                raise GeneratorEnded(f"the trainer refuses {self.hello.generator}: {reason}")
            case _:
                raise GeneratorEnded(f"the trainer sent {type(message).__name__} to an engine")

    async def _commit(self, commit: Commit) -> None:
        version = commit.version
        live = self.commits.version
        if live is not None and (version < live or (version == live and commit.publisher == self.commits.publisher)):
            reason = f"version {version} is not newer than {live}, which is live"
            answer = Failed(version=version, attempt=commit.attempt, phase="commit", reason=reason, poisoned=False)
            self.link.send(answer)
            return
        try:
            async with asyncio.timeout(self.commit_timeout_s):
                ranks = await (self._swap_again(version) if version == live else self._swap(version))
        except Exception as error:  # noqa: BLE001 - vLLM may raise anything here
            text = f"{type(error).__name__}: {first_line(error)}"
            self._poisoned(version, text if str(error) else f"no answer in {self.commit_timeout_s:.0f} s")
        # A rank answers with its error instead of raising, which would leave the other ranks' answers in vLLM's queues.
        if errors := [f"rank {number}: {rank['error']}" for number, rank in enumerate(ranks) if "error" in rank]:
            self._poisoned(version, "; ".join(errors))
        self.commits.add(commit, max(rank["gap_s"] for rank in ranks))
        self._committed = Committed(
            version=version,
            gap_s=self.commits.gap_s,
            running=running(self.engine),
            attempt=commit.attempt,
            publisher=commit.publisher,
        )
        self.link.send(self._committed)

    async def _swap(self, version: int) -> list[dict[str, Any]]:
        call = self.engine.engine_core.call_utility_async
        ranks: list[dict[str, Any]] = await call("commit_weights", *self._named(version))
        return ranks

    def _named(self, version: int) -> tuple[int, ...]:
        return (version, self.adapter) if self.adapter else (version,)

    async def _swap_again(self, version: int) -> list[dict[str, Any]]:
        """Swaps to a version number that is already stamped: it comes from a restarted publisher, whose weights may
        differ. No KV computed before may remain: the prefix cache is reset, and running requests are prefilled anew."""
        call = self.engine.engine_core.call_utility_async
        ranks: list[dict[str, Any]] = await call("collective_rpc", "commit_weights", None, self._named(version))
        if not any("error" in rank for rank in ranks):
            await call("reset_prefix_cache", True)
        return ranks

    def _poisoned(self, version: int, text: str) -> NoReturn:
        """The engine stamps the version before the ranks answer, so its tags can't be trusted from here on."""
        reason = one_line(text, MAX_REASON)
        self.link.send(Failed(version=version, phase="commit", reason=reason, poisoned=True))
        raise GeneratorEnded(f"version {version} could not be committed: {reason}")


def _answers(committed: Committed, commit: Commit) -> bool:
    return (committed.version, committed.attempt, committed.publisher) == (
        commit.version,
        commit.attempt,
        commit.publisher,
    )
