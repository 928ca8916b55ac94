"""Options of the addresses on which a process of a run listens, and under which others reach it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from inflight.config.checks import require

LOOPBACK = "127.0.0.1"
ADDRESS = "an IP address of one interface, not link-local with IPv6"


@dataclass(frozen=True)
class NetworkConfig:
    """Sockets of TCP that a process opens: HTTP of generators, the rendezvous of transports and, where `bind` is set,
    the control sockets."""

    bind: str = ""
    """IP address, IPv4 or IPv6, of the interface on which this process listens. Empty: loopback alone, and Unix sockets
    for control; the processes that a launcher starts on other hosts then find out by which address they reach the
    trainer's."""
    advertise: str = ""
    """IP address under which other hosts reach this process if it is not `bind`, as behind a translation of addresses.
    Connections of gloo and NCCL themselves always use `bind`."""
    ports: str = ""
    """Ports to listen on, FIRST-LAST; empty: any free one. Connections of gloo and NCCL use ports that the kernel
    chooses (net.ipv4.ip_local_port_range)."""

    def __post_init__(self) -> None:
        require(not self.bind or is_address(self.bind), "network.bind", self.bind, f"{ADDRESS}, or empty")
        fits = not self.advertise or (bool(self.bind) and is_address(self.advertise))
        require(fits, "network.advertise", self.advertise, f"{ADDRESS}, together with network.bind, or empty")
        allowed = "FIRST-LAST, such as 20000-20999, both 1024 to 65535, or empty"
        require(not self.ports or self._has_ports(), "network.ports", self.ports, allowed)

    def _has_ports(self) -> bool:
        if re.fullmatch(r"\d{4,5}-\d{4,5}", self.ports) is None:
            return False
        first, last = self.span
        return 1024 <= first <= last < 1 << 16

    @property
    def address(self) -> str:
        """Where this process listens."""
        return self.bind or LOOPBACK

    @property
    def reached(self) -> str:
        """Under which address others reach it."""
        return self.advertise or self.address

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last port; (0, 0): any."""
        first, _, last = (self.ports or "0-0").partition("-")
        return int(first), int(last)


def is_address(text: str) -> bool:
    """Whether it is an IP address that one interface has, and that means the same on every host: a link-local address
    of IPv6 does not, as its zone (`%eth0`) is the name of an interface of one host."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or address.is_link_local):
        return False
    return not (address.is_unspecified or address.is_multicast)


def joined(host: str, port: int | str) -> str:
    """`10.0.0.2:5700`, or `[fd00::2]:5700`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(address: str) -> tuple[str, int]:
    """Host and port of what `joined` has made. Raises ValueError for anything else than an IP address and a port."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_address(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16 or joined(host, port) != address:
        raise ValueError(f"{address!r} is no IP address with a port")
    return host, int(port)
