"""Tests do not patch our modules: what a test changes comes in as a parameter."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = "slipstream"


def patches(source: str) -> list[int]:
    """Return the lines that set a private name of our modules, or any name by its path."""
    tree = ast.parse(source)
    ours = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if f"{getattr(node, 'module', None) or alias.name}.".startswith(f"{PACKAGE}.")
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", ""))
        in ("setattr", "patch", "object")
        and is_ours(node.args, ours)
    ]


def is_ours(arguments: list[ast.expr], ours: set[str]) -> bool:
    match arguments:
        case [ast.Constant(value=str(path)), *_]:
            return path.startswith(f"{PACKAGE}.")
        case [target, ast.Constant(value=str(name)), *_] if name.startswith("_"):
            return any(isinstance(one, ast.Name) and one.id in ours for one in ast.walk(target))
    return False


def test_a_patch_of_a_private_name_is_found():
    for source, is_found in [
        ('monkeypatch.setattr("slipstream.broker.client.MAX", 1)', True),
        ("from slipstream.broker import client as one\nmonkeypatch.setattr(one, '_MAX', 1)", True),
        ("from slipstream.broker.client import A\nsetattr(A.b, '_max', 1)", True),
        ("import slipstream.broker\nmock.patch.object(slipstream.broker, '_max', 1)", True),
        ("import os\nmonkeypatch.setattr(os, '_exit', 1)", False),
        ("from slipstream.broker import client\nmonkeypatch.setattr(client.os, 'link', 1)", False),
    ]:
        assert bool(patches(source)) is is_found


def test_no_test_patches_a_private_name_of_ours():
    texts = {path: path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}
    assert len(texts) > 300
    found = {p: patches(text) for p, text in texts.items() if "setattr" in text or "patch" in text}
    assert not {path: lines for path, lines in found.items() if lines}
