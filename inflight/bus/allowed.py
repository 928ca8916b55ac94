"""The public keys that a listener accepts, and whose they are: the files in `allowed/`. The launcher adds some during a
run, for processes that are not configured, and removes them when these have left."""

from __future__ import annotations

import logging
from pathlib import Path

from inflight.bus.keys import KeysError, public_key

log = logging.getLogger(__name__)


class AllowedKeys:
    """Read anew at each handshake, as far as the folder has changed. Methods may be called from any thread: what is
    known is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        """`folder` has `allowed/`. Raises KeysError for a file that holds no key."""
        self._folder = folder / "allowed"
        self._files = {path: public_key(path) for path in self._folder.glob("*.key")}
        self._owners = self._by_key()

    def owner_of(self, key: str) -> str | None:
        """The name of the process that a public key belongs to; None: it is not allowed."""
        return self._owners.get(key)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection with this public key is accepted; pyzmq calls it, by this name, and needs an answer."""
        try:
            self._refresh()
        except (OSError, KeysError) as error:
            log.warning("new keys can't be read: %s", error)
        return key.decode("ascii", "replace") in self._owners

    def _refresh(self) -> None:
        there = set(self._folder.glob("*.key"))
        if there != self._files.keys():
            self._files = {path: self._files.get(path) or public_key(path) for path in there}
            self._owners = self._by_key()

    def _by_key(self) -> dict[str, str]:
        return {key: path.stem for path, key in self._files.items()}
