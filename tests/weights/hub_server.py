"""A local server for the part of the hub's protocol that huggingface_hub uses."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """Models by name: files by path. `asked` are the paths of requests, `tokens` those that may see a gated model."""

    def __init__(self):
        self.models: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.commits: list[dict] = []
        self.down = False


@contextmanager
def serve() -> Iterator[tuple[str, Hub]]:
    """Yields the address, and the server's files."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        answer = api or file
        if not answer or (refusal := self._refusal(answer[1], answer[2 if file else 3])):
            return self._send(*(refusal if answer else (404, b"", {"X-Error-Code": "RepoNotFound"})))
        files = self.hub.models[answer[1]]
        if file:
            return self._file(files, file[3])
        entries = [self._entry(name, data) for name, data in files.items()]
        if api and api[2] == "tree":
            return self._send(200, json.dumps(entries).encode())
        info = {"id": answer[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, json.dumps(info).encode())

    def do_POST(self):
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.asked.append(f"POST {path}")
        if path == "/api/repos/create":
            data = json.loads(body)
            name = "/".join(part for part in (data.get("organization"), data["name"]) if part)
            self.hub.models.setdefault(name, {})
            return self._send(200, json.dumps({"url": f"http://{self.headers['Host']}/{name}", "id": name}).encode())
        if path == "/api/validate-yaml":
            return self._send(200, json.dumps({"errors": [], "warnings": []}).encode())
        model, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if action == "preupload":
            files = [f | {"uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            return self._send(200, json.dumps({"files": files}).encode())
        if action == "commit":
            return self._commit(model, [json.loads(line) for line in body.splitlines()])
        return self._send(404, b"")

    def _commit(self, model: str, lines: list[dict]):
        for line in lines:
            if line["key"] == "file":
                self.hub.models[model][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self.hub.commits += [line["value"] for line in lines if line["key"] == "header"]
        url = f"http://{self.headers['Host']}/{model}/commit/{COMMIT}"
        self._send(200, json.dumps({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""}).encode())

    def _refusal(self, model: str, revision: str | None):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.hub.down:
            return 503, b"", {}
        if model not in self.hub.models:
            return 401, b"", {"X-Error-Code": "RepoNotFound"}
        if model in self.hub.gated and token not in self.hub.tokens:
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        if revision not in (None, "main", "v1", COMMIT):
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        return None

    def _entry(self, name: str, data: bytes) -> dict:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _file(self, files: dict[str, bytes], name: str):
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        tag = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, files[name], tag)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
