"""Control sockets between processes; the only package that imports zmq.

A Listener (ROUTER, binds) talks to many Links (DEALER, connect), each with an identity. Per peer, messages arrive in
order and are never dropped silently: a message that can't be queued raises, a peer that has gone is reported as Lost,
and input that is no valid message of a known peer is counted in `refused` and logged. Each endpoint has a thread that
alone uses its socket, so all methods may be called from any thread. Heartbeats run in that thread: they prove that the
process lives, not that it makes progress (each phase has a timeout of its own).

Sockets are Unix sockets or on loopback. An address that other hosts can reach requires keys (see `keys`); the launcher
makes them for every TCP address.
"""

from inflight.bus.endpoint import BusError, PeerLost
from inflight.bus.keys import add_key, make_keys, remove_key
from inflight.bus.link import Link
from inflight.bus.listener import Listener, Lost, Received
from inflight.bus.pump import Arrivals, pumped

__all__ = [
    "Arrivals",
    "BusError",
    "Link",
    "Listener",
    "Lost",
    "PeerLost",
    "Received",
    "add_key",
    "make_keys",
    "pumped",
    "remove_key",
]
