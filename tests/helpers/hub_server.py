"""A server with the endpoints of the Hugging Face hub that an upload uses; it keeps what it receives.

with HubServer() as hub: ...  HF_ENDPOINT=hub.url ...  hub.files("me/model", "main") -> {path: content}
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_valid"  # nosec B105
SMALL_BYTES = 2000  # larger files go to the storage for large files, as on the hub
COMMIT = "c" * 40


class HubServer:
    """The repositories, created by requests, and all requests in their order."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}  # name -> private, and files by branch
        self.objects: dict[str, bytes] = {}  # of the storage for large files, by SHA-256
        self.requests: list[tuple[str, str]] = []
        self.commits: list[str] = []  # messages
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        found: dict[str, bytes] = self.repositories[repository]["branches"][branch]
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.requests.append(("PUT", self.path))
        assert hashlib.sha256(content).hexdigest() == self.path.rsplit("/", 1)[1]
        self.hub.objects[self.path.rsplit("/", 1)[1]] = content
        self._answer({})

    def do_POST(self) -> None:
        body, path = self._body(), unquote(self.path.partition("?")[0])
        self.hub.requests.append(("POST", path))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/objects/" not in path:
            self._answer({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/(\w+/[\w-]+)/branch/(.+)", path):
            branches = self.hub.repositories[found[1]]["branches"]
            branches[found[2]] = dict(branches["main"])
            self._answer({}, 201)
        elif re.fullmatch(r"/api/models/(\w+/[\w-]+)/preupload/(.+)", path):
            sizes = {file["path"]: file["size"] for file in json.loads(body)["files"]}
            modes = {name: "lfs" if size > SMALL_BYTES else "regular" for name, size in sizes.items()}
            kinds = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._answer({"files": kinds})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/storage/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/(\w+/[\w-]+)/commit/(.+)", path):
            self._commit(found[1], found[2], body)
        else:
            self._answer({"error": f"no such endpoint: {path}"}, 404)

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization', 'me')}/{request['name']}"
        known = name in self.hub.repositories
        repository = {
            "private": bool(request.get("private") or request.get("visibility") == "private"),
            "branches": {"main": {}},
        }
        self.hub.repositories.setdefault(name, repository)
        self._answer({"url": f"{self.hub.url}/{name}", "name": name}, 409 if known else 200)

    def _commit(self, repository: str, branch: str, body: bytes) -> None:
        files = self.hub.files(repository, branch)
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        url = f"{self.hub.url}/{repository}/commit/{COMMIT}"
        self._answer({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def log_message(self, *_: object) -> None:
        """Print nothing."""
