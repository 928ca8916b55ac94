"""One child process that runs foreign code, from the actor's side: started, called, and killed when it is late.

starting --Constructed--> serving --late answer, memory--> spent --last call answered--> killed
                       |  a call exceeds its limit, or the process ends
                       +--> killed; each of its calls fails, with the information whether others ran beside it
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from inflight.actor import calls
from inflight.actor.calls import Answer, Begun, CallError, Constructed, FromChild, Make, Raised, Unusable
from inflight.actor.output import Allowance, ChildOutput
from inflight.actor.pending import ChildLost, NotMade, PendingCall
from inflight.descendants import kill_tree, orphans
from inflight.exits import in_words

GRACE_S = 1.0
"""Seconds after a call's limit during which the child may still cancel it by itself."""

LAST_WORDS_S = 0.5
"""Seconds for which a child's output is read after its end."""

_births = threading.Lock()
"""Held while a child is started, until `_children` has it."""
_children = set[int]()
"""Pids of all workers of this process that were started and not reaped."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a child process."""

    limit_s: float
    """Seconds for a call."""
    start_s: float
    """Seconds for constructing the task or tokenizer."""
    memory_mib: int
    """Private memory of each of its processes; 0: unlimited."""
    concurrency: int
    """Calls at once, if they are asynchronous."""


class WorkerProcess:
    """A child process; to be used from one event loop. `changed` is called when it is ready, has a free slot, or has
    ended."""

    def __init__(self, make: Make, bounds: Bounds, allowance: Allowance, changed: Callable[[], None]) -> None:
        """Starts the child, whose output is copied within the allowance. Raises OSError when no process can be
        started."""
        self._make = make
        self._bounds = bounds
        self.allowance = allowance
        self._changed = changed
        self.ready: Constructed | None = None
        self.ended = self.over = False
        self.not_made: NotMade | None = None
        """Why it could not construct its task or tokenizer, once it has ended."""
        self._spent = self._late = False
        self._calls = 0
        """Number of calls that it was given."""
        self._heard = time.monotonic()
        self._pending: dict[int, PendingCall] = {}
        self._stop = asyncio.Event()
        here, there = socket.socketpair()
        with there:
            self._output = ChildOutput(allowance, calls.what_for(make))
            try:
                self._process = _start(there, bounds.memory_mib, self._output.write_end)
            except OSError:
                self._output.close()
                here.close()
                raise
            self._output.started()
        self._life = asyncio.create_task(self._live(here), name=f"worker {self._process.pid}")

    @property
    def lasting(self) -> bool:
        """Whether it can take calls, now or when it is ready."""
        return not (self.ended or self._spent)

    @property
    def slots(self) -> int:
        """Most calls at once."""
        if self.ready is None or not self.lasting:
            return 0
        return self._bounds.concurrency if self.ready.concurrent else 1

    @property
    def load(self) -> int:
        """Number of calls in progress."""
        return len(self._pending)

    def submit(self, number: int, frame: bytes) -> asyncio.Future[Answer]:
        """Sends the frame of a call; the future gets its answer, or CallFailed or ChildLost.

        When the future is cancelled, the call keeps its slot until the child has answered it or is killed for it.
        """
        pending = PendingCall(asyncio.get_running_loop().create_future())
        self._calls += 1
        self._pending[number] = pending
        self._watch(pending)
        self._writer.write(frame)
        return pending.result

    async def close(self) -> None:
        """Kills the child and its descendants; returns when they have ended."""
        self._stop.set()
        await asyncio.shield(self._life)

    # --- its life ------------------------------------------------------------------------------------------------

    async def _live(self, here: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=here)
        exited = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(exited, self._stop.set)
        talking = asyncio.create_task(self._talk(reader))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({talking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._process.poll() is not None:  # its last output may be unread
                await asyncio.wait({talking}, timeout=LAST_WORDS_S)
        finally:
            self.ended = True
            for task in (talking, stopping):
                task.cancel()
            asyncio.get_running_loop().remove_reader(exited)
            os.close(exited)
            self._writer.close()
        code = await asyncio.to_thread(self._reap)
        self._output.close()
        results = await asyncio.gather(talking, return_exceptions=True)
        self._over(results[0], in_words(code))

    async def _talk(self, reader: asyncio.StreamReader) -> None:
        """Reads until the child has ended. Raises NotMade or CallError."""
        self._writer.write(calls.encode(self._make))
        try:
            async with asyncio.timeout(self._bounds.start_s):
                message = await calls.read_from_child(reader)
        except TimeoutError:
            raise NotMade(f"not made within {self._bounds.start_s:g} s") from None
        if isinstance(message, Unusable):
            raise NotMade(message.reason, bad_input=message.bad_input)
        if message is None:
            return
        if not isinstance(message, Constructed):
            raise CallError(f"{type(message).__name__} at the start")
        self.ready = message
        self._changed()
        while (message := await calls.read_from_child(reader)) is not None:
            self._heard = time.monotonic()
            self._take(message)

    def _take(self, message: FromChild) -> None:
        if isinstance(message, Constructed | Unusable):
            raise CallError(f"{type(message).__name__} in the middle")
        pending = self._pending.get(message.call)
        if pending is None:
            return
        if isinstance(message, Begun):
            pending.begun = True
            pending.since = time.monotonic()
            self._watch(pending)
            return
        del self._pending[message.call]
        pending.answer(message, first=self._calls == 1)
        self._spent = self._spent or (isinstance(message, Raised) and message.spent)
        if self._spent and not self._pending:
            self._stop.set()
        self._changed()

    def _watch(self, pending: PendingCall) -> None:
        """Checks the call again at the time when it would be late; if it is, kills the child."""
        if pending.timer is not None:
            pending.timer.cancel()
        # A call that has not begun waits behind others: any message of the child shows that it is not stuck.
        since = pending.since if pending.begun else max(pending.since, self._heard)
        left = since + self._bounds.limit_s + GRACE_S - time.monotonic()
        if left > 0:
            pending.timer = asyncio.get_running_loop().call_later(left, self._watch, pending)
        else:
            self._late = True
            self._stop.set()

    def _over(self, error: object, how: str) -> None:
        """The child has ended, and its calls with it."""
        if self.ready is None:
            self.not_made = error if isinstance(error, NotMade) else NotMade(f"its process ended: {how}")
        elif isinstance(error, CallError):
            how = "no message"
        # A thread or an alarm that an earlier call has left may end the process.
        company = len(self._pending) > 1 or (self._calls > 1 and not self._late)
        for pending in self._pending.values():
            pending.fail(ChildLost(how, late=self._late, company=company))
        self._pending.clear()
        self.over = True
        self._changed()

    def _reap(self) -> int:
        """Kills the child unless it has ended, and all its descendants; returns its exit code."""
        if self._process.poll() is None:
            kill_tree(self._process.pid, reap=False)
        code = self._process.wait()
        with _births:
            _children.discard(self._process.pid)
            left = orphans(_children)
        for pid in left:  # of a child that ended by itself: this process has adopted its orphans
            kill_tree(pid)
        return code


def _start(connection: socket.socket, memory_mib: int, output: int) -> subprocess.Popen[bytes]:
    """A child of this process that holds one end of a connection, and writes to the file descriptor `output`."""
    number = connection.fileno()
    command = ["--connection", str(number), "--parent", str(os.getpid()), "--memory-mib", str(memory_mib)]
    with _births:
        process = subprocess.Popen(
            [sys.executable, "-m", "inflight.actor.worker", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[number],
        )
        _children.add(process.pid)
    return process
