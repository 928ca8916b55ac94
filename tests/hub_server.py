"""A hub of models and data sets on loopback, for the real huggingface_hub client: repositories whose revisions are
folders here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STALLS_S = 60.0
LFS = (".safetensors",)
"""Files that the hub keeps elsewhere, and redirects to."""


@dataclass
class Repository:
    """Commits by their name, the folder of each, and which commit a branch is at."""

    commits: dict[str, Path]
    branches: dict[str, str]
    gated: bool = False


@dataclass
class HubServer:
    """What it has, and what it was asked for: `METHOD path`."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    """By `owner/name`, of data sets `datasets/owner/name`."""
    asked: list[str] = field(default_factory=list)
    url: str = ""
    sends: threading.Event = field(default_factory=threading.Event)
    """While it is not set, large files are asked for and do not come."""

    def downloads(self) -> list[str]:
        """Names of the files that were sent, each time."""
        return [path.rpartition("/")[2] for path in self.asked if re.match(r"GET /(?!api/).*/(resolve|lfs)/", path)]


def commit_of(text: str) -> str:
    """A name as git's."""
    return hashlib.sha1(text.encode()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[HubServer]:
    """The hub, until the end of the context."""
    hub = HubServer()
    hub.sends.set()

    class Handler(_Handler):
        server_state = hub

    server = _Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # else a client has ended
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server_state.asked.append(f"{self.command} {path}")
        found = re.fullmatch(
            r"/(api/(models/)?)?(?P<id>(datasets/)?[^/]+/[^/]+)"
            r"(/(?P<what>revision|tree|paths-info|resolve|lfs)/(?P<at>[^/]+)(/(?P<file>.*))?)?",
            path,
        )
        repository = self.server_state.repositories.get(found["id"]) if found else None
        if found is None or repository is None:
            self._refuse(401, "RepoNotFound", "Invalid username or password.")  # as for a client that is not logged in
            return
        at = found["at"] or "main"
        commit = repository.branches.get(at, at)
        folder = repository.commits.get(commit)
        if folder is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {found['at']}")
        elif found["what"] in ("revision", None):
            names = [{"rfilename": name} for name in _files(folder)]
            self._json({"id": found["id"], "sha": commit, "siblings": names, "gated": repository.gated})
        elif repository.gated:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif found["what"] == "tree":
            query = urllib.parse.parse_qs(self.path.partition("?")[2].lower())
            self._json(_tree(folder, found["file"] or "", recursive=query.get("recursive") != ["false"]))
        elif found["what"] == "paths-info":
            asked = self._paths()
            self._json([_entry(folder, name) for name in _files(folder) if name in asked])
        else:
            self._file(found, folder, commit)

    def _paths(self) -> list[str]:
        """Those that a request asks about, in a form or as JSON."""
        if self.headers["Content-Type"].startswith("application/json"):
            return list(json.loads(self.body)["paths"])
        return urllib.parse.parse_qs(self.body).get("paths", [])

    def _file(self, found: re.Match[str], folder: Path, commit: str) -> None:
        path = folder / found["file"]
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        data, etag = path.read_bytes(), _oid(path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if found["what"] == "resolve" and path.suffix in LFS:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            headers["Location"] = f"{self.server_state.url}/{found['id']}/lfs/{commit}/{found['file']}"
            self._send(302, b"", headers)
            return
        if found["what"] == "lfs" and self.command == "GET":
            self.server_state.sends.wait(STALLS_S)
        self._send(200, data, headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _tree(root: Path, under: str, *, recursive: bool) -> list[dict[str, object]]:
    """Entries of a folder, in the folders below as well where that is asked for."""
    found: list[dict[str, object]] = []
    for path in sorted((root / under).iterdir()):
        name = str(path.relative_to(root))
        if path.is_file():
            found.append(_entry(root, name))
        else:
            found.append({"type": "directory", "path": name, "size": 0, "oid": commit_of(name)})
            found += _tree(root, name, recursive=True) if recursive else []
    return found


def _oid(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in LFS:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(folder: Path, name: str) -> dict[str, object]:
    path = folder / name
    size = path.stat().st_size
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": commit_of(name)}
    if path.suffix in LFS:
        entry["lfs"] = {"oid": _oid(path), "size": size, "pointerSize": 134}
    else:
        entry["oid"] = _oid(path)
    return entry
