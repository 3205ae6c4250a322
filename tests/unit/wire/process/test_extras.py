"""A missing library is told in one line, with the extra that pyproject.toml has it in."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import EXIT_BAD_SETTINGS, run_role
from slipstream.wire.process.extras import (
    BASE,
    EXTRAS,
    MARKS,
    missing_library,
    missing_marks,
    pip_install,
    refuse_missing,
)

ROOT = Path(__file__).parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SEVERAL = {
    "pyzmq": "zmq",
    "pillow": "PIL",
    "protobuf": "google",
    "flash-attn-4": "flash_attn",
}  # distributions whose module has another name
NOT_IMPORTED = {"dev"}  # extras of tools


def modules(requirements: list[str]) -> set[str]:
    names = [re.sub("-core$", "", Requirement(text).name) for text in requirements]
    return {SEVERAL.get(name, name).replace("-", "_") for name in names}


def absent(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleNotFoundError:
    """Return the error of an import, as if its library were not installed."""
    package = name.partition(".")[0]
    for known in [one for one in sys.modules if one.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    return caught.value


def test_the_table_is_that_of_pyproject():
    expected: dict[str, set[str]] = {name: {BASE} for name in modules(PROJECT["dependencies"])}
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra in NOT_IMPORTED:
            continue
        for name in modules(requirements):
            expected.setdefault(name, set()).add(extra)
    assert {name: set(having) for name, having in EXTRAS.items()} == expected


def test_the_marks_of_a_role_are_of_its_extra_and_installed_here():
    for extra, names in MARKS.items():
        assert all(extra in EXTRAS[name] for name in names)
    assert missing_marks(*MARKS) == {}


@pytest.mark.parametrize(
    ("library", "install"),
    [
        ("ray.util", "pip install 'slipstream[cluster]'"),
        ("megatron.core", "pip install 'slipstream[learner]'"),
        ("rich", "pip install slipstream"),
    ],
)
def test_a_missing_library_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, library: str, install: str
):
    told = missing_library(absent(monkeypatch, library))
    assert str(told) == f"{library.partition('.')[0]} is not installed: {install}"


@pytest.mark.parametrize(
    ("package", "extra"),
    [("generators.text", "generators"), ("learner", "learner"), ("deploy.commands", "learner")],
)
def test_of_several_extras_that_of_the_asking_package_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    asking = {"__name__": "asking", "__package__": f"slipstream.{package}"}
    with pytest.raises(ModuleNotFoundError) as caught:
        exec("import tokenizers", asking)  # noqa: S102 our own text
    assert str(missing_library(caught.value)).endswith(f"pip install 'slipstream[{extra}]'")


def test_other_modules_are_not_explained(monkeypatch: pytest.MonkeyPatch):
    assert missing_library(absent(monkeypatch, "of_a_user")) is None
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("msgspec.no_such_module")
    assert missing_library(caught.value) is None


@pytest.mark.parametrize("in_a_group", [False, True])
def test_a_role_ends_with_that_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_a_group: bool
):
    error = absent(monkeypatch, "pyarrow")

    def body() -> int:
        raise BaseExceptionGroup("tasks", [error]) if in_a_group else error

    assert run_role(body) == EXIT_BAD_SETTINGS
    line = "pyarrow is not installed: pip install 'slipstream[data]'\n"
    assert capsys.readouterr().err == line


def test_everything_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    for name in ("torch", "megatron", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)
    missing = missing_marks("learner", "generators")
    with pytest.raises(ConfigError) as caught:
        refuse_missing(missing)
    assert str(caught.value) == (
        "not installed here: torch, megatron, sglang: pip install 'slipstream[learner,generators]'"
    )
    refuse_missing({})


def test_extras_are_named_in_one_call():
    assert pip_install(["data", "", "storage"]) == "pip install 'slipstream[data,storage]'"
    assert pip_install([]) == "pip install slipstream"
