"""The engine's side of the weight protocol: the publisher says commit, the engine core does, the agent answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from inflight.bus import Link, PeerLost
from inflight.messages import AnyMessage, Commit, Committed, EngineHello, Failed, Finish, Refused

POLL_S = 0.2


class GeneratorEnded(RuntimeError):
    """Why the generator stops serving, in one line for the user."""


class Engine(Protocol):
    """What the agent needs of vLLM's AsyncLLM (patched)."""

    engine_core: Any

    def get_num_unfinished_requests(self) -> int: ...


@dataclass
class Commits:
    """What the status tells of the swaps so far."""

    version: int
    swaps: int = 0
    gap_s: float = 0.0
    """Of the last swap: the longest time that a rank's step loop stood still."""
    max_gap_s: float = 0.0

    def add(self, version: int, gap_s: float) -> None:
        """Notes one swap."""
        self.version, self.swaps = version, self.swaps + 1
        self.gap_s, self.max_gap_s = gap_s, max(gap_s, self.max_gap_s)


@dataclass
class EngineAgent:
    """Speaks with the publisher as `<generator>.engine` for as long as the generator serves."""

    link: Link
    engine: Engine
    hello: EngineHello
    commit_timeout_s: float
    commits: Commits = field(init=False)

    def __post_init__(self) -> None:
        self.commits = Commits(self.hello.version)

    async def run(self) -> None:
        """Returns when the publisher says that the run is over.

        Raises GeneratorEnded when the publisher refuses this engine, is silent for too long, or a commit went wrong.
        """
        self.link.send(self.hello)
        while True:
            try:
                message = await asyncio.to_thread(self.link.receive, POLL_S)
            except PeerLost as error:
                raise GeneratorEnded(f"the trainer is gone: {error}") from None
            if isinstance(message, Finish):
                return
            await self._obey(message)

    async def _obey(self, message: AnyMessage | None) -> None:
        match message:
            case None:
                pass
            case Commit(version=version):
                await self._commit(version)
            case Refused(reason=reason):
                raise GeneratorEnded(f"the trainer refuses {self.hello.generator}: {reason}")
            case _:
                raise GeneratorEnded(f"the trainer sent {type(message).__name__} to an engine")

    async def _commit(self, version: int) -> None:
        if version <= self.commits.version:
            reason = f"version {version} is not newer than {self.commits.version}, which is live"
            self.link.send(Failed(version=version, phase="commit", reason=reason, poisoned=False))
            return
        try:
            async with asyncio.timeout(self.commit_timeout_s):
                ranks = await self.engine.engine_core.call_utility_async("commit_weights", version)
        except Exception as error:  # noqa: BLE001 - whatever a rank raised arrives here
            # The engine stamps the version before the ranks answer, so its tags can't be trusted from here on.
            reason = f"{type(error).__name__}: {error}" if str(error) else f"no answer in {self.commit_timeout_s:.0f} s"
            reason = reason.splitlines()[0][:1000]
            self.link.send(Failed(version=version, phase="commit", reason=reason, poisoned=True))
            raise GeneratorEnded(f"version {version} could not be committed: {reason}") from None
        self.commits.add(version, max(rank["gap_s"] for rank in ranks))
        running = self.engine.get_num_unfinished_requests()
        self.link.send(Committed(version=version, gap_s=self.commits.gap_s, running=running))
