"""Chooses the generator for each request: the least loaded of those that are listed for requests and answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

import aiohttp

from inflight.actor.silence import Calls
from inflight.completions import healthy

PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 5.0


class NoGenerator(RuntimeError):
    """No generator answered in time; the text names those that were waited for."""


@dataclass
class Generator:
    """A generator as this actor sees it."""

    name: str
    url: str = ""
    load: int = 0
    """Number of this actor's requests that it works on."""
    up: bool = False
    calls: Calls = field(default_factory=Calls)
    version: int = 0
    """Version of the newest token received from it."""


@dataclass
class Together:
    """Requests with the same long prompt: a generator that has computed it for one of them does not compute it for the
    others."""

    worth: int
    """How many requests more than the least loaded generator has are accepted for that."""
    generator: str = ""
    """Where the first of them went."""


class Pool:
    """All generators of the run. One that fails gets no requests until it is healthy, at the URL that it then has.

    One whose URL is withdrawn gets no new requests, because it has to catch up first; its current ones continue.

    To be used from one event loop; `async with` starts and stops the probing of generators that are down.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        names: list[str],
        url_of: Callable[[str], str],
        *,
        most: int = 1 << 16,
        listed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`url_of` returns a generator's current URL and raises OSError while it must not get requests.

        At most `most` leases exist at a time, which bounds the number of open connections. `listed` returns the names
        of generators that get requests: those beyond `names` are in the pool for as long.
        """
        self._session = session
        self._free = asyncio.Semaphore(most)
        self._url_of = url_of
        self._listed = listed
        self._configured = frozenset(names)
        self.generators = {name: Generator(name) for name in names}
        self._came_up = asyncio.Condition()
        self._probing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pool:
        self._probing = asyncio.create_task(self._probe(), name="probe generators")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def wait_any(self, timeout_s: float) -> None:
        """Returns when a generator is up. Raises NoGenerator after `timeout_s`, naming the generators."""
        await self._one_up(timeout_s, "was ready")

    @contextlib.asynccontextmanager
    async def lease(
        self, avoid: Collection[str], timeout_s: float, together: Together | None = None
    ) -> AsyncIterator[Generator]:
        """The least loaded generator that is up, preferably one not in `avoid`, or that of the requests that this one
        is `together` with; counts as load while in use.

        Waits while the maximum number of leases is in use; waiters are served in order. After that, raises NoGenerator
        when no generator is up within `timeout_s`.
        """
        async with self._free:
            generator = await self._one_that_is_up(avoid, timeout_s, together)
            if together is not None:
                together.generator = together.generator or generator.name
            generator.load += 1
            try:
                yield generator
            finally:
                generator.load -= 1

    async def _one_that_is_up(self, avoid: Collection[str], timeout_s: float, together: Together | None) -> Generator:
        while (generator := self._choose(avoid, together)) is None:  # again if it went down in the meantime
            await self._one_up(timeout_s, "answered")
        return generator

    async def _one_up(self, timeout_s: float, missed: str) -> None:
        """Waits for a generator that is up; `missed` says in NoGenerator what none of them did."""
        async with self._came_up:
            try:
                # Not asyncio.wait_for: its task may still be about to take the lock when this one gives the lock back.
                async with asyncio.timeout(timeout_s):
                    await self._came_up.wait_for(lambda: bool(self._up()))
            except TimeoutError:
                names = ", ".join(self.generators)
                raise NoGenerator(f"no generator {missed} within {timeout_s:.0f} s: {names}") from None

    def mark_down(self, generator: Generator) -> None:
        """Sends it no requests until it answers a probe."""
        generator.up = False

    def _choose(self, avoid: Collection[str], together: Together | None) -> Generator | None:
        def cost(generator: Generator) -> tuple[bool, int]:
            spared = together.worth if together is not None and generator.name == together.generator else 0
            return generator.name in avoid, generator.load - spared

        return min(self._up(), key=cost, default=None)

    def _up(self) -> list[Generator]:
        """Raises the error that ended the probing: without it no generator could come up again."""
        if self._probing is not None and self._probing.done():
            self._probing.result()
        return [generator for generator in self.generators.values() if generator.up]

    async def _probe(self) -> None:
        try:
            async with asyncio.TaskGroup() as all_of_them:  # one that hangs does not delay the others
                for generator in self.generators.values():
                    all_of_them.create_task(self._watch(generator), name=f"probe {generator.name}")
                while True:
                    for name in set(self._listed()) - self.generators.keys():
                        self.generators[name] = Generator(name)
                        all_of_them.create_task(self._watch(self.generators[name]), name=f"probe {name}")
                    await asyncio.sleep(PROBE_EVERY_S)
        finally:
            async with self._came_up:
                self._came_up.notify_all()

    async def _watch(self, generator: Generator) -> None:
        while self._is_known(generator):
            url = self._url(generator)
            if generator.up and url != generator.url:
                self.mark_down(generator)
            if not generator.up and url is not None and await healthy(self._session, url, PROBE_TIMEOUT_S):
                async with self._came_up:
                    generator.url = url
                    generator.up = True
                    self._came_up.notify_all()
            await asyncio.sleep(PROBE_EVERY_S)
        del self.generators[generator.name]

    def _is_known(self, generator: Generator) -> bool:
        return generator.name in self._configured or generator.load > 0 or generator.name in self._listed()

    def _url(self, generator: Generator) -> str | None:
        try:
            return self._url_of(generator.name)
        except OSError:
            return None
