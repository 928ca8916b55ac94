"""How bad values are refused: one line that names the value, its place and what is allowed."""

from __future__ import annotations

LARGEST = 1_000_000_000
"""Of a number that no other bound is known for: it fits into the 32 bits that torch and vLLM have for some."""
LARGEST_REAL = 1e38
"""Of a real number that multiplies weights: float32 holds it."""
LONGEST_S = 1e8
"""Three years; threads and sockets can't wait for much longer than a hundred of that."""

MAX_PROCESSES = 1024
"""Of one kind."""


class ConfigError(ValueError):
    """A configuration value that can't be used; the text names it, its place and what is allowed."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError naming the value, where it was set and what is allowed."""
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed: {allowed}")


def require_fields(
    config: object, section: str, names: str, *, least: float | None = None, most: float = LARGEST
) -> None:
    """Requires the fields to be `least` or more, without `least` above 0, and at most `most`; seconds LONGEST_S."""
    for name in names.split():
        value, limit = getattr(config, name), LONGEST_S if name.endswith("_s") else most
        require(not value > limit, f"{section}.{name}", value, f"at most {limit:.15g}")
        fits = value > 0 if least is None else value >= least
        require(fits, f"{section}.{name}", value, "above 0" if least is None else f"{least:.15g} or more")
