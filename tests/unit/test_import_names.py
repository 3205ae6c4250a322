"""One import name that is ours alone, and light packages that stay light."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from grimp import build_graph

PACKAGES = ("wire", "algos", "broker", "weightbus", "generators", "learner", "deploy")
HEAVY = ("torch", "megatron", "sglang", "ray")
ROOT = Path(__file__).parents[2]

IMPORTED_BY = re.compile(r"Imported by ([^.]+(?:\.\w[^.]*)*)\.(?:\s|$)")
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, sys.argv[1] + ".")]
for name in names:
    importlib.import_module(name)
print(len(names), *(heavy for heavy in sys.argv[2:] if heavy in sys.modules))
"""


def printed(*command: str, cwd: Path) -> str:
    run = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_distribution_has_one_import_name():
    listed = distribution("slipstream").read_text("top_level.txt") or ""
    assert listed.split() == ["slipstream"]


@pytest.mark.parametrize("name", PACKAGES)
def test_an_import_name_leads_to_this_checkout(name: str):
    code = f"import slipstream.{name} as package; print(package.__file__)"
    found = Path(printed("-P", "-c", code, cwd=Path("/")))
    assert found.resolve() == ROOT / name / "__init__.py"


def test_a_checkout_without_its_links_is_named_with_the_way_out(tmp_path: Path):
    folder = tmp_path / "slipstream"
    folder.mkdir()
    shutil.copy(ROOT / "src" / "slipstream" / "__init__.py", folder)
    for name in PACKAGES:
        (folder / name).write_text(f"../../{name}")  # as a zip has it
    run = subprocess.run(
        [sys.executable, "-c", "import slipstream"], cwd=tmp_path, capture_output=True, text=True
    )
    assert f"ImportError: {folder / 'algos'} is no folder" in run.stderr
    assert "git config core.symlinks true" in run.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_room_has_a_short_docstring(name: str):
    for file in (ROOT / name).rglob("__init__.py"):
        text = file.read_text("utf-8")
        assert text.startswith('"""'), file
        assert 1 <= len(text.strip().splitlines()) <= 6, file


@pytest.mark.parametrize("name", ["wire", "broker"])
def test_the_light_packages_do_not_import_a_heavy_library(name: str):
    num_modules, *heavy = printed("-c", IMPORT_ALL, f"slipstream.{name}", *HEAVY, cwd=ROOT).split()
    files = [p for p in (ROOT / name).rglob("*.py") if p.name != "__init__.py"]
    assert int(num_modules) >= len(files)
    assert heavy == []


def test_a_room_names_its_importers():
    graph = build_graph("slipstream")
    rooms = [file.parent for name in PACKAGES for file in (ROOT / name).rglob("__init__.py")]
    named = {}
    for folder in rooms:
        found = IMPORTED_BY.search(" ".join((folder / "__init__.py").read_text("utf-8").split()))
        if found is not None:
            module = ".".join(("slipstream", *folder.relative_to(ROOT).parts))
            named[module] = {f"slipstream.{one}" for one in re.split(r", | and ", found[1])}
    assert len(named) > 20
    for module, listed in named.items():
        importers = {
            importer
            for one in {module} | graph.find_descendants(module)
            for importer in graph.find_modules_that_directly_import(one)
            if not is_in(importer, module)
        }
        strangers = {one for one in importers if not any(is_in(one, name) for name in listed)}
        assert not strangers, f"{module} is imported by {strangers} too"
        idle = {name for name in listed if not any(is_in(one, name) for one in importers)}
        assert not idle, f"{module} is not imported by {idle}"


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
