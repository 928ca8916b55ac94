"""CURVE keys of a run: they authenticate processes on sockets that other hosts can reach.

The launcher makes one pair for the listeners and one for each process, named like the start of its identities (`g0` for
`g0.r1`). Secret keys lie in files that only their owner may read, public ones in `allowed/`. A listener accepts only
connections with these keys and only messages whose sender's name belongs to the connection's key, and replies over the
same connection: a stolen key affects one process, not all. Encryption numbers each message, so a recorded one can't be
replayed.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

LISTENER = "listener"
_Z85 = re.compile(rb"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A key in ZeroMQ's text encoding."""


_MASKED = threading.Lock()
"""Held while the mask of new files, which is the process's, is not the user's."""


class KeysError(RuntimeError):
    """Keys are missing or can't be used; the text is one line."""


@contextlib.contextmanager
def for_owner_alone() -> Iterator[None]:
    """New files are readable by their owner alone. Two threads at once would each restore the other's mask, and leave
    keys that all may read: one waits for the other."""
    with _MASKED:
        before = os.umask(0o077)
        try:
            yield
        finally:
            os.umask(before)


def make_keys(folder: Path, names: Iterable[str]) -> None:
    """Makes new key pairs for the listeners and the named processes. Raises OSError when they can't be written."""
    with for_owner_alone():
        (folder / "allowed").mkdir(mode=0o700, parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, LISTENER)
    for name in names:
        add_key(folder, name)


def add_key(folder: Path, name: str) -> None:
    """Makes a new key pair for one process; listeners accept it from now on. Raises OSError when it can't be
    written."""
    with for_owner_alone():
        public, _ = zmq.auth.create_certificates(folder, name)
        os.replace(public, folder / "allowed" / Path(public).name)


def remove_key(folder: Path, name: str) -> None:
    """Listeners accept no new connection with the key of a process any more; no effect when it has none."""
    for path in (folder / "allowed" / f"{name}.key", folder / f"{name}.key_secret"):
        path.unlink(missing_ok=True)


def derive_keys(folder: Path, token: str, name: str) -> None:
    """Writes the key pairs of one listener and of one name that connects to it, both computed from a secret that both
    sides have. Raises OSError when they can't be written."""
    with for_owner_alone():
        (folder / "allowed").mkdir(parents=True, exist_ok=True)
        for each in (LISTENER, name):
            digest = hashlib.blake2b(token.encode(), digest_size=32, person=each.encode()[:16]).digest()
            secret = z85.encode(digest)
            public = zmq.curve_public(secret)
            shown = f'curve\n    public-key = "{public.decode()}"\n'
            target = folder if each == LISTENER else folder / "allowed"
            (target / f"{each}.key").write_text(shown)
            (folder / f"{each}.key_secret").write_text(f'{shown}    secret-key = "{secret.decode()}"\n')


def needed(endpoint: str) -> bool:
    """Whether other hosts may reach an address: true except for Unix sockets and loopback."""
    kind, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if kind in ("ipc", "inproc"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def guard(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Gives a listening socket its key pair: a connection needs keys then, and an authenticator that accepts them."""
    public, secret = _load(folder / f"{LISTENER}.key_secret")
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    socket.curve_server = True


def identify(socket: zmq.Socket[bytes], identity: str, folder: Path) -> None:
    """Gives a connecting socket its own key and the public key that it requires of the listener."""
    public, secret = _load(folder / f"{name_of(identity)}.key_secret")
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    socket.curve_serverkey = _load(folder / f"{LISTENER}.key", secret=False)[0]


def public_key(path: Path) -> str:
    """The public key in a file. Raises KeysError when it holds none."""
    return _load(path, secret=False)[0].decode()


def name_of(identity: str) -> str:
    """The process that an identity belongs to: `g0` for `g0.r1`."""
    return identity.partition(".")[0]


def _load(path: Path, *, secret: bool = True) -> tuple[bytes, bytes]:
    try:
        public, found = zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        raise KeysError(f"the key {path} can't be read: {error}") from None
    if not all(_Z85.fullmatch(key) for key in (public, found) if key is not None):
        raise KeysError(f"the key {path} can't be read: it holds no CURVE key")
    if secret and path.stat().st_mode & 0o077:
        raise KeysError(f"the secret key {path} may be read by others: chmod 600")
    return public, found or b""
