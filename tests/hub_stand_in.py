"""A small local server that answers like the Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """Repositories of models with one branch, `main`. It serves while it is used as a context.

    Attributes:
        repositories: content of each repository's files, by id and name.
        private: ids of repositories that need the token.
        cut_off: (id, name) of files whose downloads break off half-way.
        fetched: (id, name) of every file that was sent, in order.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.cut_off: set[tuple[str, str]] = set()
        self.fetched: list[tuple[str, str]] = []

    def __enter__(self) -> Hub:
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the environment of a process that knows only this Hub and keeps fetched files in `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {**kept, "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def knows_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_GET(self) -> None:
        match self.path.split("?")[0].strip("/").split("/"):
            case [owner, name, "resolve", revision, file]:
                self.send_file(f"{owner}/{name}", revision, file)
            case ["api", "models", owner, name]:
                self.send_listing(f"{owner}/{name}")
            case _:
                self.answer(404)

    do_HEAD = do_GET

    def may_read(self, repo: str) -> bool:
        """Whether a repository may be read. If not, it was answered in a way that hides which private ones exist."""
        if repo in self.server.repositories and (repo not in self.server.private or self.knows_token):
            return True
        self.answer(401, X_Error_Code="RepoNotFound")
        return False

    def send_file(self, repo: str, revision: str, name: str) -> None:
        if not self.may_read(repo):
            return
        files = self.server.repositories[repo]
        commit = hashlib.sha1(b"".join(files[each] for each in sorted(files))).hexdigest()
        if revision not in ("main", commit):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if name not in files:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content, headers = files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'}
        if self.command == "GET":
            self.server.fetched.append((repo, name))
            if (repo, name) in self.server.cut_off:
                headers["Content-Length"] = str(len(content))
                content = content[: len(content) // 2]
        self.answer(200, content, X_Repo_Commit=commit, **headers)

    def send_listing(self, repo: str) -> None:
        if self.may_read(repo):
            files = self.server.repositories[repo]
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self.answer(200, json.dumps({"id": repo, "siblings": siblings}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.knows_token:
            return self.answer(401)
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            answer = json.dumps({"url": f"{self.server.endpoint}/{repo}"}).encode()
            if repo in self.server.repositories:
                return self.answer(409, answer)
            self.server.repositories[repo] = {}
            # the field depends on the library's release
            if wanted.get("private") or wanted.get("visibility") == "private":
                self.server.private.add(repo)
            return self.answer(200, answer)
        parts = self.path.split("?")[0].strip("/").split("/")
        repo, action = "/".join(parts[2:4]), parts[4]
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, json.dumps({"files": files}).encode())
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repositories[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        done = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.endpoint}/{repo}/commit/0"}
        self.answer(200, json.dumps(done).encode())
