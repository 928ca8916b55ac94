"""How the bench's trainer calls methods of a generator's engine: JSON lines over a Unix socket.

It stands for the HTTP routes by which the compared projects do the same (pause, update, resume), with less overhead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

SOCKET = "INFLIGHT_BENCH_CONTROL"
"""The environment variable that tells a generator where to listen."""
TICK_S = 0.005
LINE_BYTES = 1 << 22
"""Longest request: the names and shapes of all parameters."""


class ControlError(RuntimeError):
    """The engine refused a call or did not answer."""


class Activity:
    """What the engine did since the last reading, from looks at it every TICK_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._paused = False
        self._clock = clock
        self._at = clock()
        self._forget()

    def _forget(self) -> None:
        self._spent = {"idle_s": 0.0, "paused_s": 0.0, "working_s": 0.0}
        self._sequences = 0.0

    def look(self, running: int) -> None:
        """Counts the time since the last look for the state that the engine is in now."""
        now = self._clock()
        lasted, self._at = now - self._at, now
        state = "paused_s" if self._paused else "working_s" if running else "idle_s"
        self._spent[state] += lasted
        self._sequences += running * lasted

    def pause(self, on: bool, running: int) -> None:
        """The engine is paused from now on, or no more."""
        self.look(running)
        self._paused = on

    def take(self) -> dict[str, float]:
        """Seconds idle (no request), paused and working since the last call, and the mean number of unfinished
        requests."""
        total = sum(self._spent.values())
        taken = {**self._spent, "sequences": self._sequences / total if total else 0.0}
        self._forget()
        return taken


class Control:
    """The generator's side: serves calls on its engine, a vLLM AsyncLLM."""

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._activity = Activity()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """While open, the socket listens and the engine is looked at."""
        server = await asyncio.start_unix_server(self._serve, str(self._path), limit=LINE_BYTES)
        watching = asyncio.create_task(self._watch(), name="activity")
        try:
            yield
        finally:
            watching.cancel()
            server.close()

    async def _watch(self) -> None:
        while True:
            self._activity.look(self._running())
            await asyncio.sleep(TICK_S)

    def _running(self) -> int:
        return int(self._engine.output_processor.get_num_unfinished_requests())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    answer = {"result": await self._call(**json.loads(line))}
                except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
                    answer = {"error": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(answer, default=str).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _call(self, method: str, args: list[Any]) -> Any:
        match method:
            case "pause":
                self._activity.pause(True, self._running())
                return await self._engine.pause_generation(mode=args[0], clear_cache=False)
            case "resume":
                await self._engine.resume_generation()
                self._activity.pause(False, self._running())
                return None
            case "activity":
                self._activity.look(self._running())
                return self._activity.take()
            case "running":
                return self._running()
            case "rpc":
                return await self._engine.engine_core.call_utility_async("collective_rpc", args[0], None, args[1:])
            case _:
                return await self._engine.engine_core.call_utility_async(method, *args)


class Caller:
    """The trainer's side; from one thread at a time."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Raises OSError when nothing listens there."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")
        self.seconds: dict[str, list[float]] = {}
        """What was called → how long each call took."""

    def call(self, method: str, *args: Any) -> Any:
        """The result of one call. Raises ControlError, also when none comes in time."""
        started = time.monotonic()
        try:
            self._socket.sendall(json.dumps({"method": method, "args": args}).encode() + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise ControlError(f"{method}: the generator did not answer: {error}") from None
        if not line:
            raise ControlError(f"{method}: the generator has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ControlError(f"{method}: {answer['error']}")
        called = str(args[0]) if method == "rpc" else method
        self.seconds.setdefault(called, []).append(time.monotonic() - started)
        return answer["result"]

    def close(self) -> None:
        """Ends the connection."""
        self._lines.close()
        self._socket.close()
