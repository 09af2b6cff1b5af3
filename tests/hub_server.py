"""A small Hugging Face Hub on loopback, for the real client: HF_ENDPOINT points at it.

It serves what a pull needs: model information with sizes and hashes, files with ETag and Range, and the refusals of
the real Hub (no such model, gated, private, wrong token). Tests make it misbehave: cut connections, change bytes.

    with HubServer() as hub:
        hub.add("org/name", {"config.json": b"{}", "model.safetensors": data})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
_LARGE = (".safetensors", ".bin", ".gguf", ".model")  # what the Hub keeps in Git LFS, with a SHA-256


@dataclass
class Repo:
    """`access`: public, gated (a token must be in `members`) or private (any valid token)."""

    files: dict[str, bytes]
    access: str = "public"
    members: set[str] = field(default_factory=set)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            digest.update(name.encode() + git_hash(data).encode())
        return digest.hexdigest()


@functools.cache
def git_hash(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@functools.cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class HubServer:
    """`requests` lists (method, path, Range header); cut, alter and stall make it misbehave, once per entry."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut: dict[str, int] = {}  # file name → close the connection after so many bytes of it
        self.alter: dict[str, bytes] = {}  # file name → send these bytes instead
        self.stall: dict[str, int] = {}  # file name → send so many bytes of it, then nothing until `go` is set
        self.stalled = threading.Event()
        self.go = threading.Event()
        self.status: int | None = None  # answer everything with this status
        self.ranges = True  # honour Range requests
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], *, access: str = "public", members: tuple[str, ...] = ()) -> None:
        self.repos[name] = Repo(dict(files), access, set(members))

    def fetched(self) -> list[str]:
        """Names of the files that were asked for with GET, in order."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.status is not None:
                return self._refuse(hub.status, "", "the server is not well")
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                return self._info(match[1])
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
                return self._tree(match[1])
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file(match[1], match[3], with_body=with_body)
            return self._refuse(404, "", "no such page")

        def _repo(self, name: str) -> Repo | None:
            """The repository, or None after a refusal has been sent, as the Hub words it."""
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if token and not token.startswith(TOKEN):
                self._refuse(401, "", "Invalid credentials in Authorization header")
                return None
            repo = hub.repos.get(name)
            if repo is None or (repo.access == "private" and not token):
                self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
                return None
            if repo.access == "gated" and token not in repo.members:
                self._refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted")
                return None
            return repo

        def _entry(self, name: str, data: bytes) -> dict[str, Any]:
            entry: dict[str, Any] = {"size": len(data), "blobId": git_hash(data), "oid": git_hash(data)}
            if name.endswith(_LARGE):
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            return entry

        def _info(self, name: str) -> None:
            if repo := self._repo(name):
                siblings = [{"rfilename": file, **self._entry(file, data)} for file, data in sorted(repo.files.items())]
                self._json({"_id": "0", "id": name, "modelId": name, "sha": repo.commit, "siblings": siblings})

        def _tree(self, name: str) -> None:
            if repo := self._repo(name):
                rows = [{"type": "file", "path": f, **self._entry(f, data)} for f, data in sorted(repo.files.items())]
                self._json(rows)

        def _file(self, name: str, file: str, *, with_body: bool) -> None:
            repo = self._repo(name)
            if repo is None:
                return
            if file not in repo.files:
                self._refuse(404, "EntryNotFound", "Entry not found")
                return
            data = repo.files[file]
            etag = sha256(data) if file.endswith(_LARGE) else git_hash(data)
            if with_body and file in hub.alter:
                data = hub.alter.pop(file)
            start = 0
            if hub.ranges and (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")):
                start = int(match[1])
                if start >= len(data):
                    self._refuse(416, "", "Range not satisfiable")
                    return
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", repo.commit)
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if with_body:
                self._send_body(file, data[start:])

        def _send_body(self, file: str, data: bytes) -> None:
            if file in hub.cut:
                data = data[: hub.cut.pop(file)]
                self.close_connection = True
            try:
                if file in hub.stall:
                    count = hub.stall.pop(file)
                    self.wfile.write(data[:count])
                    data = data[count:]
                    hub.stalled.set()
                    hub.go.wait(60)
                self.wfile.write(data)
            except OSError:  # the client went away, as some tests do
                self.close_connection = True

        def _json(self, value: Any) -> None:
            raw = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _refuse(self, status: int, code: str, message: str) -> None:
            raw = json.dumps({"error": message}).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

    return Handler
