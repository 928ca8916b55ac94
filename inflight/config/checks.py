"""Validation of options: a bad value is refused in one line with the value, its place and what is allowed."""

from __future__ import annotations

LARGEST = 1_000_000_000
"""Upper limit of numbers without a limit of their own: it fits into the 32 bits in which torch and vLLM store some."""
LARGEST_REAL = 1e38
"""Upper limit of real numbers that multiply weights: float32 can hold it."""
LONGEST_S = 1e8
"""Longest duration, three years; threads and sockets can't wait for more than about a hundred times that."""

MAX_PROCESSES = 1024
"""Most processes of one kind."""


class ConfigError(ValueError):
    """A configuration value that can't be used; the text names it, its place and what is allowed."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError that names the value, its place and what is allowed."""
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed: {allowed}")


def require_fields(
    config: object, section: str, names: str, *, least: float | None = None, most: float = LARGEST
) -> None:
    """Requires each field to be at least `least`, or above 0 without it, and at most `most`; for seconds LONGEST_S."""
    for name in names.split():
        value = getattr(config, name)
        limit = LONGEST_S if name.endswith("_s") else most
        require(not value > limit, f"{section}.{name}", value, f"at most {limit:.15g}")
        fits = value > 0 if least is None else value >= least
        require(fits, f"{section}.{name}", value, "above 0" if least is None else f"{least:.15g} or more")
