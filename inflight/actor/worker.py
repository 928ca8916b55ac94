"""`python -m inflight.actor.worker`: a child of the actor that runs foreign code, which may hang, crash or fill its
memory.

It constructs one task (or tokenizer), answers calls over an inherited socket, and is killed from outside when a call is
late: nothing here is needed to end foreign code. Asynchronous calls are cancelled here at their limit, as long as the
event loop runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from inflight.actor import calls
from inflight.actor.calls import Ask, AskReward, AskScore, CallError, FromChild, Make, MakeTokenizer, Raised, Unusable
from inflight.actor.services import Service, UnusableResult, service_of
from inflight.config import ConfigError
from inflight.descendants import adopt
from inflight.error_line import one_line, with_kind
from inflight.lifeline import end_with
from inflight.models import ModelError

MAX_TEXT = 1000
"""Most characters of an exception's text that are sent."""
MAX_TRACE = 4000
"""Most characters of a traceback that are sent."""
TRACE_FRAMES = 20
"""Innermost frames of it."""


async def serve(connection: socket.socket) -> None:
    """Constructs what the first message names, then answers calls until the actor closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    message = await calls.read_to_child(reader)
    if not isinstance(message, Make):
        return
    made = _make(message)
    limit_s = None if isinstance(message, MakeTokenizer) else message.limit_s
    if isinstance(made, Unusable):
        writer.write(calls.encode(made))
        await writer.drain()
        return
    writer.write(calls.encode(made.ready()))
    working = set[asyncio.Task[None]]()
    while (ask := await calls.read_to_child(reader)) is not None:
        if not isinstance(ask, Make):
            task = asyncio.create_task(_work(made, ask, writer, limit_s))
            working.add(task)  # the loop itself holds only weak references
            task.add_done_callback(working.discard)


def _make(message: Make) -> Service | Unusable:
    try:
        return service_of(message)
    except (ConfigError, ModelError) as error:
        return Unusable(one_line(error, MAX_TEXT), bad_input=True)
    except BaseException as error:  # noqa: BLE001 - foreign code, which may even call sys.exit
        return Unusable(with_kind(error, MAX_TEXT), bad_input=False)


async def _work(made: Service, ask: Ask, writer: asyncio.StreamWriter, limit_s: float | None) -> None:
    own = os.getpid()
    writer.write(calls.encode(calls.Begun(ask.call)))  # sent before the call, which may never return
    answer = await answered(made, ask, limit_s)
    if os.getpid() != own:  # foreign code has forked, and this is the other process: the call is not its own
        os._exit(1)
    writer.write(answer)


async def answered(made: Service, ask: Ask, limit_s: float | None) -> bytes:
    """The frame with the answer, or with the error."""
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            answer: FromChild = await made.answer(ask)
        return calls.encode(answer)
    except UnusableResult as error:
        raised = Raised(call=ask.call, kind=error.kind, text=one_line(error, MAX_TEXT))
    except MemoryError as error:
        raised = Raised(
            call=ask.call, kind="MemoryError" + _place(made.files), text=one_line(error, MAX_TEXT), spent=True
        )
    except BaseException as error:  # noqa: BLE001 - foreign code, which may even call sys.exit
        late = scope.expired()
        kind = one_line(type(error).__name__) + _place(made.files)
        trace = _trace(error, made.files) if isinstance(ask, AskReward | AskScore) and not late else ""
        raised = Raised(call=ask.call, kind=kind, text=one_line(error, MAX_TEXT), trace=trace, late=late, spent=late)
    return calls.encode(raised)


def _trace(error: BaseException, files: frozenset[str]) -> str:
    """Its traceback in printable lines, from the first line that lies in one of `files` on, where one does. Empty when
    it can't be made: foreign code is asked for the text of its exceptions."""
    try:
        found = traceback.TracebackException.from_exception(error, limit=-TRACE_FRAMES)
        own = next((at for at, frame in enumerate(found.stack) if frame.filename in files), 0)
        found.stack[:] = found.stack[own:]
        lines = "".join(found.format())[: 2 * MAX_TRACE].splitlines()
    except BaseException:  # noqa: BLE001 - as above
        return ""
    shown = ("".join(each if each.isprintable() else " " for each in line) for line in lines)
    return "\n".join(shown)[:MAX_TRACE]


def _place(files: frozenset[str]) -> str:
    """Of the exception that is being handled, ` at rewards.py:12`: the innermost line that lies in one of `files`.
    Nothing when none does."""
    place = ""
    for frame, line in traceback.walk_tb(sys.exc_info()[2]):
        if frame.f_code.co_filename in files:
            place = f" at {one_line(Path(frame.f_code.co_filename).name)}:{line}"
    return place


def _bound(memory_mib: int) -> None:
    """Limits the private memory of this process and of each child, disables core files, and makes this process the
    first to be killed when the machine runs out of memory."""
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/oom_score_adj").write_text("1000")


def _keep_from_forks(connection: int) -> None:
    """Gives processes that foreign code forks something else than the connection, on which they would take calls and
    answer them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, connection, inheritable=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the actor has closed the connection, 1 when it sent something else than calls."""
    parser = argparse.ArgumentParser(prog="python -m inflight.actor.worker", description=__doc__)
    parser.add_argument("--connection", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the actor")
    parser.add_argument("--memory-mib", type=int, default=0)
    arguments = parser.parse_args(argv)
    end_with(arguments.parent)
    adopt()
    _bound(arguments.memory_mib)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="worker %(asctime)s %(levelname)s %(message)s")
    connection = socket.socket(fileno=arguments.connection)
    connection.set_inheritable(False)  # else processes that the task starts would hold it open
    _keep_from_forks(arguments.connection)
    try:
        # Not asyncio.run, which would cancel threads of foreign code and wait for them.
        asyncio.new_event_loop().run_until_complete(serve(connection))
    except CallError as error:
        print(f"inflight actor's worker: {error}", file=sys.stderr)
        return 1
    return 0


def _end() -> NoReturn:
    """Runs `main` and ends this process, without waiting for threads and exit handlers of foreign code. Foreign code
    may also end the event loop: SystemExit in a callback or a task of its own."""
    code = 1
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - whatever it was, nothing more is answered
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    with contextlib.suppress(BaseException):  # foreign code may have closed or replaced it
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end()
