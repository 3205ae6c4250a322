"""A server that answers as the Hugging Face hub does, as far as a download of a model needs it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

Commits = dict[str, Mapping[str, bytes]]  # files by name, of each commit; the last one is main


@contextmanager
def hub_server(name: str, commits: Commits, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve a model to this process; yield the paths of what was downloaded of it."""
    downloads: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].split("/")
            api, resolve = f"/api/models/{name}/", f"/{name}/resolve/"
            if self.path.startswith(f"{api}revision/"):
                self.answer(json.dumps({"id": name, "sha": [*commits][-1]}).encode())
            elif self.path.startswith(f"{api}tree/") and parts[6] in commits:
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": etag(data)}
                    for path, data in commits[parts[6]].items()
                ]
                self.answer(json.dumps(tree).encode())
            elif self.path.startswith(resolve) and parts[4] in commits:
                path = "/".join(parts[5:])
                downloads.extend([path] * (self.command == "GET"))
                self.answer(commits[parts[4]][path], {"X-Repo-Commit": parts[4]})
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        do_HEAD = do_GET  # noqa: N815 http.server's name

        def answer(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(HTTPStatus.OK)
            facts = {"Content-Length": str(len(data)), "ETag": f'"{etag(data)}"', **(headers or {})}
            for key, value in facts.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        resolve = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(huggingface_hub.constants, "ENDPOINT", url)  # as HF_ENDPOINT sets them
        patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield downloads
        finally:
            server.shutdown()


def etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
