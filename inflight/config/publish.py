"""Options of the transport of weights, and the timeouts of each phase of a version."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.checks import require_fields, require_one_of

ON_HOST = ("gloo",)
"""Transports that carry bytes in host memory."""
ON_DEVICE = ("ipc", "nccl")
"""Transports that carry bytes from GPU to GPU."""
TRANSPORTS = (*ON_HOST, *ON_DEVICE)


@dataclass(frozen=True)
class PublishConfig:
    """Transport of the weights, and the timeouts of each phase of a version."""

    transport: str = "auto"
    bucket_bytes: int = 64 << 20
    checksum: str = "auto"
    """Whether each rank verifies the received bytes before it reports a version as ready: CRC-32 of each bucket on the
    host (gloo), sums computed by the devices on CUDA (ipc, nccl). `always`, `none`, or `auto`: with gloo alone, because
    on CUDA it slows decoding (docs/gpu.md)."""
    finite_check: bool = True
    """Reject a version that contains NaN or Inf, before a generator computes with it and before it is saved as a
    checkpoint; the run then ends."""
    join_timeout_s: float = 300.0
    """Seconds for which a trainer runs without any generator, and a generator without a trainer."""
    transfer_timeout_s: float = 120.0
    commit_timeout_s: float = 60.0
    supersede_after_s: float = 30.0
    """Seconds for which a publish waits for generators that are still receiving the version before. Afterwards that
    version is superseded: they get the newer one instead, provided that some generator has the one before."""
    retry_after_s: float = 1.0
    """Seconds after which a failed transfer of the newest version is retried; the delay doubles with each failure, up
    to 60 s."""
    max_behind: int = 4
    """A generator that is more than this many versions behind the newest gets no requests until it has caught up."""

    def __post_init__(self) -> None:
        require_one_of(self, "publish", "transport", ("auto", *TRANSPORTS))
        require_fields(self, "publish", "bucket_bytes", least=4096, most=1 << 40)
        require_one_of(self, "publish", "checksum", ("auto", "always", "none"))
        require_fields(self, "publish", "join_timeout_s transfer_timeout_s commit_timeout_s retry_after_s")
        require_fields(self, "publish", "supersede_after_s", least=0)
        require_fields(self, "publish", "max_behind", least=1)
