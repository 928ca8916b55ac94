"""How bad values are refused: one line that names the value, its place and what is allowed."""

from __future__ import annotations

import math


class ConfigError(ValueError):
    """A configuration value that can't be used; the text names it, its place and what is allowed."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError naming the value, where it was set and what is allowed."""
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed: {allowed}")


LONGEST_S = 1e8
"""Three years; threads and sockets can't wait for much longer than a hundred of that."""


def require_fields(config: object, section: str, names: str, *, least: float | None = None) -> None:
    """Requires the fields to be finite and `least` or more, without `least` above 0; seconds at most LONGEST_S."""
    for name in names.split():
        value = getattr(config, name)
        fits = value > 0 if least is None else value >= least
        allowed = "above 0" if least is None else f"{least:g} or more"
        if name.endswith("_s"):
            fits, allowed = fits and value <= LONGEST_S, f"{allowed}, at most {LONGEST_S:g}"
        require(fits and value < math.inf, f"{section}.{name}", value, allowed)
