"""A task whose questions say how they misbehave, for tests with real child processes (not a test file)."""

import asyncio
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from inflight.tasks.base import Item, Score

LEAK = []


@dataclass(frozen=True)
class Odd:
    """Asks the prompts that it is given, in their order; how a completion is scored stands in the completion."""

    seed: int
    items: list = field(default_factory=list)
    """What `item` does, by index; beyond: an ordinary question."""
    folder: str = ""

    def item(self, index):
        how = self.items[index] if index < len(self.items) else "fine"
        item = Item(key=f"odd:{index}", prompt="1+1=", answer={"sum": [2, None]})
        match how:
            case "no item":
                return None
            case "no prompt":
                return Item(key="odd", prompt=None, answer="")
            case "surrogate prompt":
                return Item(key="odd", prompt="1+1=\ud835", answer="")
            case "surrogate key":
                return Item(key="odd\ud835", prompt="1+1=", answer="")
            case "long key":
                return Item(key="k" * 513, prompt="1+1=", answer="")
            case "number key":
                return Item(key=7, prompt="1+1=", answer="")
            case "object":
                return Item(key="odd", prompt="1+1=", answer=object())
            case "end":
                raise StopIteration
        return do(how, self.folder) or item

    def score(self, item, completion):
        given = do(completion, self.folder)
        return 1.0 if given is None else given


@dataclass(frozen=True)
class Waiting(Odd):
    """Scores asynchronously."""

    async def score(self, item, completion):
        if completion == "wait":
            await asyncio.sleep(3600)
        if completion == "soon":
            await asyncio.sleep(0.3)
        if completion == "short thread":
            await asyncio.to_thread(time.sleep, 0)
        if completion == "thread":
            await asyncio.to_thread(time.sleep, 9999)
        return super().score(item, completion)


@dataclass(frozen=True)
class Turned(Odd):
    """Looks at turns."""

    def score_turn(self, item, prompt_ids, turn, completion):
        match completion:
            case "float":
                return 1.0
            case "steps":
                return Score(1.0, [(len(turn.token_ids), 0.5)])
            case "teacher":
                return Score(1.0, teacher_logprobs=[-1.0])
        return Score(0.5, [(0, 0.25)], [-1.0 for _ in turn.token_ids])


def do(how, folder):
    """What foreign code may do; None when it does nothing of note."""
    match how:
        case "raise":
            raise KeyError("gone")
        case "raise unspeakable":
            raise _Unspeakable
        case "exit":
            sys.exit(3)
        case "regex":
            re.match(r"(a+)+$", "a" * 40 + "!")  # holds the GIL for hours
        case "sleep":
            time.sleep(3600)
        case "die":
            os._exit(139)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            return float(len(bytearray(30 << 30)))
        case "none":
            return None if folder == "never" else [None]
        case "text":
            return "0.5"
        case "nan":
            return float("nan")
        case "family":  # a child, a grandchild in a session of its own, then a hang
            child = subprocess.Popen(["sh", "-c", "setsid sleep 3600 & wait"])
            Path(folder, "child").write_text(str(child.pid))
            time.sleep(3600)
        case "orphan":
            orphan = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            Path(folder, "orphan").write_text(str(orphan.pid))
            os._exit(139)
        case "fork":  # the other process ends as a script would
            if os.fork() == 0:
                sys.exit(3)
        case "fork and return":
            if os.fork() == 0:
                return 0.25
        case "exit later":  # with a thread that the interpreter would wait for
            threading.Thread(target=time.sleep, args=(3600,)).start()
            asyncio.get_running_loop().call_soon(sys.exit)
        case "close output":
            for each in (sys.stdout, sys.stderr):
                each.close()
            for number in (1, 2):
                os.close(number)
        case "close all":
            os.closerange(3, 1000)
        case "signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_IGN)
        case "patch":
            time.monotonic = socket.socket.send = os.getpid = None
        case "write":
            for _ in range(64):
                os.write(1, b"x" * (1 << 20))
        case "write and die":
            os.write(1, b"y" * (3 << 19))
            os._exit(139)
        case "die later":
            threading.Timer(0.3, os._exit, (139,)).start()
        case "print":
            print("a line", flush=True)
        case "slow":
            time.sleep(0.8)
        case "leak":
            LEAK.append(bytearray(600 << 20))
        case "need":
            return float(len(bytearray(600 << 20)) > 0)
        case "thread":
            threading.Thread(target=time.sleep, args=(3600,)).start()
    return None


class _Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")
