"""A model hub on 127.0.0.1: the few endpoints a download needs, with gated repositories and broken connections."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files by revision; `token` gates it."""

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit: 40 hex digits."""
        for name in self.revisions:
            commit = hashlib.sha1(name.encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def files(self, revision: str) -> dict[str, bytes]:
        """Path -> content at a revision."""
        return next(f for name, f in self.revisions.items() if self.commit(name) == self.commit(revision))


@dataclass
class StandInHub:
    """What the server serves and what it was asked.

    Attributes:
        repositories: id -> Repository.
        requests: "METHOD path" of every request, in order.
        cut: file names whose next download breaks off half way.
        url: of the server.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    url: str = ""

    def downloads(self) -> set[str]:
        """File names that were fetched, by their content."""
        return {r.rpartition("/")[2] for r in self.requests if r.startswith("GET") and "/resolve/" in r}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[StandInHub]

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repo_id, rest = "/".join(parts[:2]), parts[2:]
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            return self._error(401, "RepoNotFound", "Repository not found")
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._error(403 if self.headers.get("Authorization") else 401, "GatedRepo", "Access is restricted")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.commit(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.files(revision)
        if not api:
            return self._file(files, "/".join(rest[2:]), commit)
        if rest[:1] == ["tree"]:
            return self._json(
                [{"type": "file", "path": name, "size": len(data), "oid": _etag(data)} for name, data in files.items()]
            )
        return self._json({"id": repo_id, "sha": commit, "siblings": [{"rfilename": name} for name in files]})

    def _file(self, files: dict[str, bytes], name: str, commit: str) -> None:
        if name not in files:
            return self._error(404, "EntryNotFound", f"{name} not found")
        data = files[name]
        start = 0
        if (asked := self.headers.get("Range")) is not None:
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.cut:
            self.hub.cut.remove(name)
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """A running hub; it stops with the block."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
