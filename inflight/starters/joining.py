"""Places processes on hosts that join by themselves, as tasks of Slurm, torchrun or a user do with `inflight join`.

    host --Join-->   launcher     offers to run a process, until there is one for it
    host <--Placed-- launcher     the parcel of a process that is to be started, or started again
    host --Vacated-> launcher     the process has ended
    host <--Finish-- launcher     the process is to end; without one, the host is not needed any more

Launcher and hosts share one secret, the join key. The key pairs of CURVE on this socket are computed from it, so no
file has to be copied: a job script makes it and gives it to all of its tasks in INFLIGHT_JOIN_KEY.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import threading
from collections.abc import Mapping, Sequence

import msgspec

from inflight.bus import BusError, Listener, Lost, Received
from inflight.bus.keys import derive_keys
from inflight.config import BusConfig, ConfigError, RunConfig
from inflight.exits import DONE, STOPPED
from inflight.messages import AnyMessage, Finish, Join, Placed, Refused, Vacated
from inflight.starters.base import UNREACHABLE, Command
from inflight.starters.parcel import Parcel, body_of, parcel_of

VARIABLE = "INFLIGHT_JOIN_KEY"
NAME = "join"
"""Hosts' names on the socket begin with it."""
KEY_FILE = "join.key"
SHORTEST = 32
"""Characters of a join key."""
DEAD_AFTER_S = 30.0
"""Seconds of silence after which a host is presumed lost, and after which it ends its process."""
_POLL_S = 0.2


class JoinHandle:
    """A process that waits for a host, runs on one, or has ended."""

    pid: int | None = None

    def __init__(self, starter: JoinStarter, parcel: Parcel, command: Command) -> None:
        self._starter = starter
        self.parcel = parcel
        self.command = command
        self.address = ""
        """The name of the host that was chosen for it; empty while it waits for one."""
        self.offer: tuple[str, int] | None = None
        """The peer that runs it, and the number of its offer."""
        self.code: int | None = None

    def poll(self) -> int | None:
        """See Handle."""
        return self.code

    def stop(self) -> None:
        """See Handle."""
        self._starter.stop(self)

    def kill(self) -> None:
        """The host keeps to its grace period, and ends its process at the latest when the launcher is silent."""
        self._starter.stop(self)


class JoinStarter:
    """For the processes of one run; has a thread over its socket."""

    def __init__(self, config: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
        """Takes the join key from the environment, or makes one and writes it into the run folder.

        Raises ConfigError for a key that is too short, BusError when the socket can't be opened, OSError when nothing
        can be written.
        """
        self._config = config
        config.path.mkdir(parents=True, exist_ok=True)
        folder = config.path / "join-keys"
        key, source = _key(config, environment)
        derive_keys(folder, key, NAME)
        bus = BusConfig(heartbeat_s=config.bus.heartbeat_s, dead_after_s=DEAD_AFTER_S, keys=str(folder))
        self._listener = Listener(config.listening("join"), bus)
        place = config.endpoint("join").removeprefix("tcp://")
        print(f"hosts join this run: inflight join {place} (the key: {source})", flush=True)
        self._lock = threading.Lock()
        self._waiting: collections.deque[JoinHandle] = collections.deque()
        self._placed: dict[str, JoinHandle] = {}
        """Peer → the process that it runs."""
        self._unserved: dict[str, str] = {}
        """Peer that has offered itself and got no process → the kind that it would run."""
        self._failures: collections.Counter[str] = collections.Counter()
        """Peer → how many processes that are not configured have failed there, one after the other."""
        self._last: dict[str, str] = {}
        """Configured process → the peer on which it ended last."""
        self._refused: dict[str, str] = {}
        """Peer that is refused → the reason."""
        self._broken: Exception | None = None
        """What has ended the thread."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="joins", daemon=True)
        self._thread.start()

    def start(self, command: Command) -> JoinHandle:
        """See Starter: the process waits for a host, without a limit of its own. Raises ConfigError for a process that
        has to run here."""
        handle = JoinHandle(self, parcel_of(self._config, command), command)
        with self._lock:
            self._waiting.append(handle)
        return handle

    def unserved(self, kind: str) -> int:
        """How many hosts have offered to run a process of a kind and got none, beyond those for which one waits."""
        with self._lock:
            waiting = sum(handle.parcel.kind == kind for handle in self._waiting)
            return max(sum(each == kind for each in self._unserved.values()) - waiting, 0)

    def refuse(self, names: Sequence[str]) -> None:
        """Refuses the hosts on which these configured processes ended last, when they offer themselves again. Raises
        BusError when nothing is heard of hosts any more."""
        if self._broken is not None:
            raise BusError(f"hosts can't join any more: {self._broken!r}")
        with self._lock:
            for name in self._last.keys() & set(names):
                self._refused[self._last[name]] = f"{name} has failed there again and again, and others work elsewhere"

    def stop(self, handle: JoinHandle) -> None:
        """Asks for a process's end; one that waits for a host has ended."""
        with self._lock:
            if handle in self._waiting:
                self._waiting.remove(handle)
                handle.code = STOPPED
            elif handle.code is None and handle.offer is not None:
                self._send(handle.offer[0], Finish(reason="the process is to end"))

    def close(self) -> None:
        """Dismisses all hosts."""
        self._closing.set()
        self._thread.join(5)
        for peer in self._listener.peers():
            self._send(peer, Finish(reason="the run is over"))
        self._listener.close()

    def _run(self) -> None:
        try:
            self._hear_all()
        except Exception as error:  # noqa: BLE001 - end of the thread: raised by `refuse`
            self._broken = error

    def _hear_all(self) -> None:
        while not self._closing.is_set():
            event = self._listener.receive(_POLL_S)
            with self._lock:
                if isinstance(event, Lost):
                    self._lose(event.peer)
                    self._unserved.pop(event.peer, None)
                    self._failures.pop(event.peer, None)
                    self._refused.pop(event.peer, None)
                elif isinstance(event, Received):
                    self._hear(event.peer, event.message)

    def _hear(self, peer: str, message: AnyMessage) -> None:
        placed = self._placed.get(peer)
        if isinstance(message, Vacated) and placed is not None and placed.offer == (peer, message.number):
            self._count(peer, placed, message.code)
            _append(placed, f"(the end of its output on {placed.address}, code {message.code})\n{message.output}")
            self._end(peer, message.code)
        elif isinstance(message, Join) and placed is not None and placed.offer == (peer, message.number):
            self._send(peer, _placed(placed, message))  # it has not come, or a repeated offer was under way
        elif isinstance(message, Join):
            self._lose(peer)  # one that makes a new offer does not run it any more
            if self._failures[peer] > self._config.launch.restarts:
                said = f"{self._failures[peer]} processes have failed there, one after the other (launch.restarts)"
                self._refused[peer] = said
            elif message.kind == "actor" and not self._config.hosts.actors_join:
                self._refused[peer] = "no actors of this run are on hosts that join (hosts.actors_join=false)"
            if peer in self._refused:
                self._send(peer, Refused(reason=self._refused[peer]))
            else:
                self._place(peer, message)

    def _count(self, peer: str, handle: JoinHandle, code: int) -> None:
        """Those that are configured are counted by the launcher, which may give them up."""
        if handle.command.configured or code in (DONE, STOPPED):
            self._failures[peer] = 0
        else:
            self._failures[peer] += 1

    def _place(self, peer: str, offer: Join) -> None:
        handle = next((each for each in self._waiting if each.parcel.kind == offer.kind), None)
        if handle is None:
            self._unserved[peer] = offer.kind
            return
        handle.address = offer.host  # before the host can run it: the launcher reads this without the lock
        if not self._send(peer, _placed(handle, offer)):
            handle.address = ""
            return
        self._waiting.remove(handle)
        self._unserved.pop(peer, None)
        handle.offer = (peer, offer.number)
        self._placed[peer] = handle

    def _lose(self, peer: str) -> None:
        if (handle := self._placed.get(peer)) is not None:
            _append(handle, f"({handle.address} is gone; its output has stayed there)")
        self._end(peer, UNREACHABLE)

    def _end(self, peer: str, code: int) -> None:
        handle = self._placed.pop(peer, None)
        if handle is not None:
            if handle.command.configured:
                self._last[handle.command.name] = peer
            handle.code = code

    def _send(self, peer: str, message: AnyMessage) -> bool:
        with contextlib.suppress(BusError):  # lost meanwhile
            self._listener.send(peer, message)
            return True
        return False


def _placed(handle: JoinHandle, offer: Join) -> Placed:
    """A process for an offer, with the GPUs of its slot."""
    return Placed(number=offer.number, parcel=body_of(msgspec.structs.replace(handle.parcel, slot=offer.slot)))


def _append(handle: JoinHandle, text: str) -> None:
    """To the log of a process, which nothing else is written to here."""
    if (path := handle.command.log) is not None:
        with contextlib.suppress(OSError):  # a full disk must not end this thread
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(text.rstrip("\n") + "\n")


def _key(config: RunConfig, environment: Mapping[str, str]) -> tuple[str, str]:
    """The join key, and where it is from."""
    if key := environment.get(VARIABLE, ""):
        return checked(key, VARIABLE), VARIABLE
    key = secrets.token_urlsafe(SHORTEST)
    path = config.path / KEY_FILE
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "w") as written:
        written.write(key + "\n")
    return key, str(path)


def checked(key: str, where: str) -> str:
    """A join key. Raises ConfigError, without the key, for one that could be guessed or is not UTF-8."""
    if not SHORTEST <= len(key) <= 256:
        raise ConfigError(f"{where} has {len(key)} characters, a join key has {SHORTEST} to 256")
    if any("\ud800" <= each <= "\udfff" for each in key):  # what Python makes of other bytes
        raise ConfigError(f"{where} is no join key: it is not UTF-8")
    return key
