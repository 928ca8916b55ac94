"""Serves a process's metrics to Prometheus, and announces where, in the run folder."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from inflight.config import RunConfig
from inflight.config.network import joined
from inflight.listening import listen

REQUEST_S = 5.0
"""Seconds within which a client must have sent its request, and taken the answer: clients are served one by one."""
TARGETS = "targets"
"""Folder, beside the control sockets, of the files from which Prometheus learns the addresses (file_sd_configs)."""
ADDRESS = "metrics"
"""Under this name a process's status has the address, for a launcher on another host."""
log = logging.getLogger(__name__)


class _MetricsHandler(WSGIRequestHandler):
    timeout = REQUEST_S  # read by socketserver

    def log_message(self, *_: object) -> None:
        """A scrape every few seconds is no news."""


class _MetricsServer(WSGIServer):
    def handle_error(self, *_: object) -> None:
        """A client that went away, or sent nothing in time, is no fault of this process."""
        log.debug("a client of the metrics was not served", exc_info=True)


class MetricsEndpoint:
    """A registry at `/metrics`, on the process's own address, in a thread. On another address than loopback, the run's
    key is required. What keeps it from listening is logged and costs the metrics alone."""

    def __init__(self, config: RunConfig, name: str, registry: CollectorRegistry) -> None:
        """`name` is the process's, such as `trainer`; nothing is served with `launch.metrics=false`."""
        self._server: _MetricsServer | None = None
        self.address = ""
        """Where it is reached, as `10.0.0.2:5700`; empty when it does not listen."""
        self._file = targets_file(config, name)
        if not config.launch.metrics:
            return
        key = config.api_key() if config.network.bind else ""
        if config.network.bind and not key:
            log.warning("no metrics are served: network.bind=%s, and the run has no key", config.network.bind)
            return
        try:
            server = self._listening(config, registry, key)
        except OSError as error:
            log.warning("no metrics are served: %s", error)
            return
        threading.Thread(target=server.serve_forever, args=(0.5,), name="metrics", daemon=True).start()
        self._server = server
        try:
            self.address = joined(config.network.reached, server.server_port)
            announce(config, name, self.address)
        except OSError as error:
            log.warning("no metrics are served: %s", error)
            self.close()

    @property
    def port(self) -> int:
        """Where it listens; 0 when it does not."""
        return self._server.server_port if self._server is not None else 0

    def _listening(self, config: RunConfig, registry: CollectorRegistry, key: str) -> _MetricsServer:
        server = _MetricsServer(("", 0), _MetricsHandler, bind_and_activate=False)
        server.socket.close()
        server.socket = listen(config.network)
        server.server_name, server.server_port = server.socket.getsockname()[:2]
        server.setup_environ()
        # Compressing takes as long as all the rest, with the GIL in turns, to save 20 kB every few seconds.
        application = make_wsgi_app(registry, disable_compression=True)
        server.set_app(keyed(application, key) if key else application)
        return server

    def close(self) -> None:
        """Ends the thread and frees the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            self.address = ""
            with contextlib.suppress(OSError):
                self._file.unlink()

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def targets_file(config: RunConfig, name: str) -> Path:
    """Where a process announces its address."""
    return config.path / "bus" / TARGETS / f"{name}.json"


def announce(config: RunConfig, name: str, address: str) -> None:
    """Writes the file by which Prometheus finds a process. Raises OSError."""
    file = targets_file(config, name)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    entry = [{"targets": [address], "labels": {"process": name, "run": config.path.name}}]
    partial = file.with_name(f".{name}.partial")
    partial.write_text(json.dumps(entry))
    partial.replace(file)


def keyed(application: Callable[..., Iterable[bytes]], key: str) -> Callable[..., Iterable[bytes]]:
    """A WSGI application that answers 401 without `Authorization: Bearer KEY`."""
    expected = f"Bearer {key}".encode()

    def checked(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if hmac.compare_digest(str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace"), expected):
            return application(environ, start)
        start("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
        return [b"a key is needed: Authorization: Bearer ...\n"]

    return checked
