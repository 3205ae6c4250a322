"""Our generic top-level names are ours alone, and the light packages stay light."""

import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

DISTRIBUTION = "slipstream"
IMPORT_NAMES = ("wire", "algos", "broker", "weightbus", "generators", "learner", "deploy")
HEAVY = ("torch", "megatron", "sglang", "ray")
ROOT = Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, sys.argv[1] + ".")]
for name in names:
    importlib.import_module(name)
print(len(names), *(heavy for heavy in sys.argv[2:] if heavy in sys.modules))
"""


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_an_import_name_belongs_to_this_distribution_only(name: str):
    # an editable install lists its names in top_level.txt alone, not as files
    assert set(packages_distributions().get(name, ())) == {DISTRIBUTION}
    listed = distribution(DISTRIBUTION).read_text("top_level.txt") or ""
    assert name in listed.split()


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_an_import_name_leads_to_this_checkout(name: str):
    code = f"import {name}; print({name}.__file__)"
    command = [sys.executable, "-P", "-c", code]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(ROOT / name / "__init__.py")


@pytest.mark.parametrize("name", ["wire", "broker"])
def test_the_light_packages_do_not_import_a_heavy_library(name: str):
    command = [sys.executable, "-c", IMPORT_ALL, name, *HEAVY]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    num_modules, *heavy = found.stdout.split()
    files = [p for p in (ROOT / name).rglob("*.py") if p.name != "__init__.py"]
    assert int(num_modules) >= len(files)
    assert heavy == []
