"""The run folder as the launcher uses it: created or found again, locked while any process of the run lives, its
sockets.

The lock belongs to an open file that the run's processes inherit, so it is held until the last of them has ended: two
starts of a run never write to the folder at once, not even when the launcher was killed and the trainer is still
stopping. A second lock is held by the launcher alone. Its holder may kill processes that inherited the first lock from
a launcher that has died: they are orphans.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from inflight import config as configuration
from inflight.bus import make_keys
from inflight.config import RunConfig
from inflight.config.folder import LOCK_FILE
from inflight.launcher.differences import of_options, of_task, refuse
from inflight.launcher.run_lock import holders, kill_orphaned, orphaned, sign
from inflight.processes import KILL_WAIT_S, describe
from inflight.trainer.checkpoint import index

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket on Linux, in bytes."""
LOCK_WAIT_S = 30.0
"""Seconds for which a resumed run waits for the launcher of its last start, which may be stopping."""


class LaunchError(RuntimeError):
    """A run can't be started; the text is one line for the user."""


class RunFolder:
    """Used as a context manager; leaving it removes the sockets and releases the lock."""

    def __init__(self, config: RunConfig) -> None:
        """Creates the folder or, with `resume`, finds the run in it; `config` is then what its processes read.

        Raises LaunchError when the folder holds a run (or, with `resume`, none), is in use, or can't be created;
        ConfigError or CheckpointError when its run can't be resumed with this configuration.
        """
        self.path = config.path
        _holds_run(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._own_lock = self._open("launcher.lock")
            self.lock = self._open(LOCK_FILE)
        except OSError as error:
            raise LaunchError(f"can't make the run folder: {error}") from None
        try:
            self._take_over(config)
            holds_run = _holds_run(config)  # another launcher may have begun a run meanwhile
        except BaseException:
            self._close()
            raise
        try:
            self.config = _resumed(config) if holds_run else config
            self._make_sockets()
            self._make_secrets()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise LaunchError(f"can't make the run folder: {error}") from None
            raise

    @property
    def bus(self) -> Path:
        """The folder of the sockets; a link when the path is too long for them."""
        return self.path / "bus"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_sockets()
        self._close()

    def _open(self, name: str) -> int:
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _close(self) -> None:
        os.close(self.lock)
        os.close(self._own_lock)

    def _take_over(self, config: RunConfig) -> None:
        """Takes and signs the locks. A resumed run first ends the orphans of a launcher that has died."""
        if not _locks(self._own_lock, LOCK_WAIT_S if config.resume else 0.0):
            who = describe(holders(self._own_lock))
            raise LaunchError(f"{self.path} is in use: its launcher is still alive: {who}")
        grace_s = config.launch.stop_grace_s if config.resume else 0.0  # they began to stop when their launcher died
        if not _locks(self.lock, grace_s):
            self._wrest(grace_s, kill=config.resume)
        sign(self.lock)

    def _wrest(self, grace_s: float, *, kill: bool) -> None:
        left = orphaned(self.lock)
        if left and kill:
            text = f"orphans of the last start that did not end within {grace_s} s, killed: {describe(left)}"
            print(f"inflight launch: {text}", file=sys.stderr, flush=True)
            left = kill_orphaned(self.lock)
        if left:
            raise LaunchError(f"{self.path} is in use: processes of its last start do not end: {describe(left)}")
        if not _locks(self.lock, KILL_WAIT_S):
            raise LaunchError(f"{self.path} is in use: its lock is held by {describe(holders(self.lock))}")

    def _make_sockets(self) -> None:
        self._remove_sockets()  # of a launcher that was killed
        if _fits(self.bus):
            self.bus.mkdir(mode=0o700)
            return
        elsewhere = tempfile.mkdtemp(prefix="inflight-")
        try:
            if not _fits(Path(elsewhere)):
                raise LaunchError(f"the path of {elsewhere} is too long for sockets; set TMPDIR to a short one")
            self.bus.symlink_to(elsewhere)
        except BaseException:
            shutil.rmtree(elsewhere, ignore_errors=True)
            raise

    def _make_secrets(self) -> None:
        """Makes new ones at each start: the API key of the generators, and CURVE keys where other users reach a
        socket."""
        file = os.open(self.config.api_key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as key:
            key.write(secrets.token_urlsafe(32) + "\n")
        if self.config.over_tcp:
            folder = self.path / "keys"
            shutil.rmtree(folder, ignore_errors=True)
            own = [*self.config.rollout.actor_names(), *self.config.generator_names()]
            make_keys(folder, ["trainer", "evaluator", *own])
            self.config = replace(self.config, bus=replace(self.config.bus, keys=str(folder)))

    def _remove_sockets(self) -> None:
        if self.bus.is_symlink():
            shutil.rmtree(self.bus.resolve(), ignore_errors=True)
            self.bus.unlink()
        else:
            shutil.rmtree(self.bus, ignore_errors=True)


def _holds_run(config: RunConfig) -> bool:
    """Whether the folder has a configuration to resume. Raises LaunchError when its content does not fit `resume`."""
    path = config.path
    holds_run = (path / configuration.CONFIG_FILE).exists()
    if holds_run and not config.resume:
        raise LaunchError(f"{path} holds a run already; choose another run_dir, or resume the run: resume=true")
    begun = holds_run or (path / LOCK_FILE).exists()  # a launcher may be killed before it has written anything
    if config.resume and not begun:
        raise LaunchError(f"{path} holds no run to resume; leave resume=true out to start one")
    return holds_run


def _locks(file: int, timeout_s: float) -> bool:
    """Takes a lock; returns False when that failed for `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        if not told:
            print("waiting for the processes of the last start to end", flush=True)
            told = True
        time.sleep(0.2)


def _resumed(config: RunConfig) -> RunConfig:
    """The configuration of the next start: its own values, and the newest checkpoint of the run in the folder."""
    before = configuration.load(config.path)
    refuse(before, [*of_task(before, config), *of_options(before, config)])
    folder = index.newest(config.path)
    if folder is not None:
        index.read(folder)
    return replace(config, checkpoint=str(folder) if folder else "")


def _fits(bus: Path) -> bool:
    return len(os.fsencode(bus / "rollouts")) < MAX_SOCKET_PATH
