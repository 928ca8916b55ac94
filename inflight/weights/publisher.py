"""The old import path of `Publisher`, kept for one release: import it from `inflight.weights.publish.publisher`."""

from inflight.weights.publish.publisher import Publisher

__all__ = ["Publisher"]
