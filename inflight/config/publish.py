"""How weights travel, and the bounds of each phase of a version."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.checks import require, require_fields

ON_HOST = ("gloo",)
"""Transports that carry bytes in host memory."""
ON_DEVICE = ("ipc", "nccl")
"""Transports that carry bytes from GPU to GPU."""
TRANSPORTS = (*ON_HOST, *ON_DEVICE)


@dataclass(frozen=True)
class PublishConfig:
    """Transport of the weights and the bounds of each phase of a version."""

    transport: str = "auto"
    bucket_bytes: int = 64 << 20
    checksum: str = "auto"
    """Whether each rank verifies what it has received before it says so: CRC-32 of each bucket on the host (gloo), sums
    by the devices on CUDA (ipc, nccl). `always`, `none`, or `auto`: with gloo alone, because on CUDA it takes from
    decoding (docs/gpu.md)."""
    finite_check: bool = True
    """Refuse a version that holds NaN or Inf, before any of it is sent or kept as a checkpoint; the run then ends."""
    join_timeout_s: float = 300.0
    """How long either side goes on without the other: a trainer without any generator, a generator without trainer."""
    transfer_timeout_s: float = 120.0
    commit_timeout_s: float = 60.0
    supersede_after_s: float = 30.0
    """A publish waits so long for generators that are still receiving the version before. Then they are left behind and
    get the newer one instead, if any generator has the one before."""
    retry_after_s: float = 1.0
    """A generator that failed to get the newest version is sent it again after so long, then twice as long, up to
    60 s."""
    max_behind: int = 4
    """A generator that is more versions than this behind the newest gets no more requests until it has caught up."""

    def __post_init__(self) -> None:
        transports = ("auto", *TRANSPORTS)
        require(self.transport in transports, "publish.transport", self.transport, ", ".join(transports))
        require_fields(self, "publish", "bucket_bytes", least=4096, most=1 << 40)
        checksums = ("auto", "always", "none")
        require(self.checksum in checksums, "publish.checksum", self.checksum, ", ".join(checksums))
        require_fields(self, "publish", "join_timeout_s transfer_timeout_s commit_timeout_s retry_after_s")
        require_fields(self, "publish", "supersede_after_s", least=0)
        require_fields(self, "publish", "max_behind", least=1)
