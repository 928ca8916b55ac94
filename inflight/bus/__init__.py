"""Control sockets between processes; the only package that imports zmq.

A Listener (ROUTER, binds) speaks with many Links (DEALER, connect), each with an identity. Per peer, messages arrive
in order and are never dropped silently: what can't be queued raises, a peer that went away is reported as Lost, and
what is no valid message of a known peer is counted in `refused` and logged. Each endpoint owns a thread that alone
touches its socket, so all methods may be called from any thread. Heartbeats run in that thread: they prove that the
process lives, not that it makes progress (phases have bounds of their own).

Sockets are Unix sockets or on loopback. An address that other hosts can reach needs keys (see `keys`); the launcher
makes some for any address.
"""

from inflight.bus.endpoint import BusError, PeerLost
from inflight.bus.keys import make_keys
from inflight.bus.link import Link
from inflight.bus.listener import Listener, Lost, Received

__all__ = ["BusError", "Link", "Listener", "Lost", "PeerLost", "Received", "make_keys"]
