"""A real generator process with a tiny model, for tests that ask it over HTTP (not a test file)."""

from __future__ import annotations

from test_swap_server import Run


class ServedModel(Run):
    """Serves version 0; `policy` are the same weights here, in float32."""

    key = ""

    @property
    def url(self) -> str:
        return self.routes()["g0"].url
