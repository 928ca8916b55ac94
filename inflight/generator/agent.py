"""The engine's side of the weight protocol: the publisher says commit, the engine core does, the agent answers."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import msgspec

from inflight.bus import Link, PeerLost
from inflight.messages import AnyMessage, Commit, Committed, EngineHello, Enquire, Failed, Finish, Refused
from inflight.messages.base import MAX_REASON

log = logging.getLogger(__name__)

POLL_S = 0.2


class GeneratorEnded(RuntimeError):
    """Why the generator stops serving, in one line for the user."""


class Engine(Protocol):
    """What the agent needs of vLLM's AsyncLLM (patched)."""

    engine_core: Any
    output_processor: Any


def running(engine: Engine) -> int:
    """How many requests the engine has not finished. AsyncLLM itself tells it in later versions than 0.26 only."""
    return int(engine.output_processor.get_num_unfinished_requests())


@dataclass
class Commits:
    """What the status tells of the swaps so far."""

    version: int | None
    """None: none yet, the engine has what it was started with."""
    publisher: str
    """Whose version that is."""
    swaps: int = 0
    gap_s: float = 0.0
    """Of the last swap: the longest stall of a rank's step loop."""
    max_gap_s: float = 0.0

    def add(self, commit: Commit, gap_s: float) -> None:
        """Notes one swap."""
        self.version, self.publisher, self.swaps = commit.version, commit.publisher, self.swaps + 1
        self.gap_s, self.max_gap_s = gap_s, max(gap_s, self.max_gap_s)


@dataclass
class EngineAgent:
    """Speaks with the publisher as `<generator>.engine` for as long as the generator serves."""

    link: Link
    engine: Engine
    hello: EngineHello
    commit_timeout_s: float
    alone_timeout_s: float = 0.0
    """How long the generator serves on after it has lost the trainer, which may come back."""
    commits: Commits = field(init=False)
    _committed: Committed | None = field(init=False, default=None)
    """The last answer to Commit, to be repeated when it got lost."""

    def __post_init__(self) -> None:
        self.commits = Commits(self.hello.version, self.hello.publisher)

    async def run(self) -> None:
        """Returns when the publisher says that the run is over.

        Raises GeneratorEnded when the publisher refuses this engine, is silent for too long, or a commit went wrong.
        """
        self.link.send(self.hello)
        alone_since: float | None = None
        while True:
            try:
                message = await asyncio.to_thread(self.link.receive, POLL_S)
            except PeerLost as error:
                alone_since = await self._be_alone(alone_since, error)
                continue
            alone_since = None  # the trainer is heard, though it may have nothing to say
            if isinstance(message, Finish):
                return
            await self._obey(message)

    async def _be_alone(self, since: float | None, error: PeerLost) -> float:
        """Serves on for a while: a trainer that comes back asks for a hello. Raises GeneratorEnded when none does."""
        now = time.monotonic()
        if since is None:
            log.warning("%s; version %s is served on", error, self.commits.version)
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
                version, publisher = self.commits.version, self.commits.publisher
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
        version, live = commit.version, self.commits.version
        if live is not None and (version < live or (version == live and commit.publisher == self.commits.publisher)):
            reason = f"version {version} is not newer than {live}, which is live"
            self.link.send(Failed(version=version, phase="commit", reason=reason, poisoned=False))
            return
        try:
            async with asyncio.timeout(self.commit_timeout_s):
                ranks = await (self._swap_again(version) if version == live else self._swap(version))
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises arrives here
            text = f"{type(error).__name__}: {error}" if str(error) else f"no answer in {self.commit_timeout_s:.0f} s"
            self._poisoned(version, text)
        # A rank answers with its error: raised, it would put vLLM's queues of the other ranks' answers out of step.
        if errors := [f"rank {number}: {rank['error']}" for number, rank in enumerate(ranks) if "error" in rank]:
            self._poisoned(version, "; ".join(errors))
        self.commits.add(commit, max(rank["gap_s"] for rank in ranks))
        self._committed = Committed(
            version=version, gap_s=self.commits.gap_s, running=running(self.engine), publisher=commit.publisher
        )
        self.link.send(self._committed)

    async def _swap(self, version: int) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = await self.engine.engine_core.call_utility_async("commit_weights", version)
        return ranks

    async def _swap_again(self, version: int) -> list[dict[str, Any]]:
        """Swaps under the number that is stamped already: a publisher that began anew has sent it, and its weights may
        be others. So no KV of before stays, neither cached nor of running requests, which are prefilled anew."""
        call = self.engine.engine_core.call_utility_async
        ranks: list[dict[str, Any]] = await call("collective_rpc", "commit_weights", None, (version,))
        if not any("error" in rank for rank in ranks):
            await call("reset_prefix_cache", True)
        return ranks

    def _poisoned(self, version: int, text: str) -> NoReturn:
        """The engine stamps the version before the ranks answer, so its tags can't be trusted from here on."""
        reason = text.splitlines()[0][:MAX_REASON]
        self.link.send(Failed(version=version, phase="commit", reason=reason, poisoned=True))
        raise GeneratorEnded(f"version {version} could not be committed: {reason}")


def _answers(committed: Committed, commit: Commit) -> bool:
    return (committed.version, committed.publisher) == (commit.version, commit.publisher)
