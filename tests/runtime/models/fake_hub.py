"""A hub on loopback: the few answers of the Hugging Face hub that downloading a model takes, faults included."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One repository, org/model, holding the files of a folder. Change the fields while it runs."""

    folder: Path
    token: str = ""  # asked for when set
    denied: int = 0  # status to answer everything with
    denial: str = ""  # the error code beside it
    failures: int = 0  # answers with 503 before anything works; negative: the connection is dropped instead
    claimed_size: int = 0  # of each file, instead of the true one
    requests: Counter = field(default_factory=Counter)  # "METHOD file" -> times

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            def setup(self):
                super().setup()
                self.hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def answer(self):
        hub, path = self.hub, self.path.split("?")[0]
        hub.requests[f"{self.command} {path.rsplit('/', 1)[-1]}"] += 1
        if hub.failures < 0:
            hub.failures += 1
            self.close_connection = True
            return
        if hub.failures > 0:
            hub.failures -= 1
            self.reply(503)
        elif hub.denied:
            self.reply(hub.denied, error=hub.denial)
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply(401, error="RepoNotFound")
        elif path.startswith("/api/models/org/model"):
            self.describe(path)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self.file(hub.folder / path.rsplit("/", 1)[-1])
        else:
            self.reply(404, error="RepoNotFound")

    def describe(self, path):
        if not path.endswith(("/org/model", "/revision/main", f"/revision/{COMMIT}")):
            return self.reply(404, error="RevisionNotFound")
        files = sorted(self.hub.folder.iterdir())
        siblings = [{"rfilename": f.name, "size": self.hub.claimed_size or f.stat().st_size} for f in files]
        return self.reply(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode())

    def file(self, file):
        if not file.is_file():
            return self.reply(404, error="EntryNotFound")
        content = file.read_bytes()
        return self.reply(200, content, etag=hashlib.sha256(content).hexdigest())

    def reply(self, status, body=b"", error="", etag=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass
