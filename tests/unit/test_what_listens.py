"""What listens is made in one room, or has a reason: limits that one listener has, all have."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "broker" / "listening"
PACKAGES = ("algos", "broker", "deploy", "generators", "learner", "weightbus", "wire")
SOCKETS = {"PUB", "PULL", "REP", "ROUTER", "SERVER", "STREAM", "XPUB"}  # of ZeroMQ
SERVERS = {
    "AppRunner", "ServerRunner", "SockSite", "TCPSite", "UnixSite", "run_app",
    "create_server", "start_server", "create_unix_server", "start_unix_server",
}  # fmt: skip
MODULES = {"http.server", "socketserver", "wsgiref.simple_server", "xmlrpc.server"}
ELSEWHERE = {
    # A Unix socket for processes of trajectories, with bounds for who has shown no ticket.
    "generators/environments/host.py": ["start_unix_server"],
    # A port that is taken for torch's store, which serves it.
    "weightbus/net/listening.py": ["listen"],
    # A port that is tried, and closed at once.
    "deploy/preflight/check/network.py": ["listen"],
    # To signals.
    "learner/main.py": ["listen"],
}


def openings(source: str) -> Iterator[str]:
    """Yield what in a source has something listen."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="zmq"), attr=name) if name in SOCKETS:
                yield f"zmq.{name}"
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in SERVERS:
                yield name
            case ast.Call(func=ast.Attribute(attr="listen")):
                yield "listen"
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name in MODULES)
            case ast.ImportFrom(module=module, names=names):
                yield from (one.name for one in names if module == "zmq" and one.name in SOCKETS)
                if module in MODULES:
                    yield str(module)


def test_nothing_listens_that_was_not_made_in_that_room():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    found = {
        str(path.relative_to(ROOT)): sorted(set(openings(path.read_text())))
        for path in files
        if not path.is_relative_to(ROOM)
    }
    assert {path: names for path, names in found.items() if names} == ELSEWHERE


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("socket = context.socket(zmq.ROUTER)", ["zmq.ROUTER"]),
        ("from zmq import REP", ["REP"]),
        ("site = web.TCPSite(runner)", ["TCPSite"]),
        ("import socketserver", ["socketserver"]),
        ("from http.server import HTTPServer", ["http.server"]),
        ("await loop.create_server(made)", ["create_server"]),
        ("await asyncio.start_unix_server(made, path)", ["start_unix_server"]),
        ("listener.listen(8)", ["listen"]),
        ("socket = context.socket(zmq.DEALER)", []),
    ],
)
def test_what_listens_is_found(source: str, what: list[str]):
    assert list(openings(source)) == what
