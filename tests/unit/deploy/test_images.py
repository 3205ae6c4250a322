"""Locks hold a hash for every file, and images are built from them, by no user with rights."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKS = sorted((ROOT / "deploy" / "locks").glob("*.txt"))
IMAGES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = ("3.11", "3.12")  # those of the CPU locks


def locked(name: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    text = (ROOT / "deploy" / "locks" / name).read_text("utf-8")
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+) \\$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.stem))
def test_every_package_of_a_lock_has_one_version_and_a_hash(lock: Path):
    blocks = re.split(r"\n(?=[a-zA-Z0-9])", lock.read_text("utf-8"))
    packages = [block for block in blocks if not block.startswith("#")]
    assert len(packages) >= 5
    for block in packages:
        assert re.match(r"[a-z0-9.-]+==[^ ]+ \\\n    --hash=sha256:[0-9a-f]{64}", block), block


def test_learner_and_generators_have_the_same_versions():
    learner, generator = locked("gpu-learner-3.12.txt"), locked("gpu-generator-3.12.txt")
    both = learner.keys() & generator.keys()
    assert {
        "torch",
        "flash-attn-4",
        "nvidia-nccl-cu13",
        "pyzmq",
        "msgspec",
        "safetensors",
        "tokenizers",
    } <= both
    assert {name: learner[name] for name in both} == {name: generator[name] for name in both}
    text = (ROOT / "deploy" / "constraints-gpu.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert (learner | generator).items() == dict(line.split("==") for line in lines).items()


LEARNER = ["learner", "cluster", "redis-server", "storage"]
GENERATOR = ["generators", "data", "rewards", "sandbox", "storage"]


@pytest.mark.parametrize(
    ("kind", "extras", "python"),
    [
        ("gpu-learner", [*LEARNER, "flash-4", "linear-attention"], "3.12"),
        ("gpu-generator", GENERATOR, "3.12"),
        *(("cpu", LEARNER + GENERATOR, python) for python in PYTHONS),
    ],
)
def test_a_lock_has_what_the_project_asks_for(kind: str, extras: list[str], python: str):
    versions = locked(f"{kind}-{python}.txt")
    wanted = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][one] for one in extras)]
    texts = [text for one in wanted for text in ([one] if isinstance(one, str) else one)]
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if (kind == "cpu" and name in {"torch", "gcsfs"}) or (
            marker is not None and not marker.evaluate({"python_version": python})
        ):
            continue  # torch for CPUs has an index of its own; gcsfs is large
        assert requirement.specifier.contains(versions[name], prereleases=True), name


@pytest.mark.parametrize("python", PYTHONS)
def test_the_cpu_lock_has_the_versions_of_the_constraints(python: str):
    text = (ROOT / "deploy" / "constraints-cpu.txt").read_text("utf-8")
    pinned = {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in map(Requirement, text.splitlines())
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    }
    of_torch = {name for name in pinned if name.startswith(("cuda-", "nvidia-"))}
    for name in of_torch | {"torch", "torchvision"}:
        del pinned[name]
    assert locked(f"cpu-{python}.txt") == pinned


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: str(image.stem))
def test_an_image_is_built_in_stages_by_hash_and_runs_without_rights(image: Path):
    text = image.read_text("utf-8").replace("\\\n", " ")
    stages = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    assert len(stages) == 2
    last = text[text.rindex("\nFROM ") :]
    assert re.findall(r"^USER (\S+)", last, flags=re.MULTILINE) == ["1000:1000"]
    assert "sbom.cdx.json" in text
    if image.stem != "cpu":  # that one's Python brings its headers along
        assert "python3.12-dev" in last, "Triton compiles against Python.h as it runs"
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, flags=re.MULTILINE):
        assert all((ROOT / path).exists() for path in source.split()), source
    for line in re.findall(r"pip install [^&\n]+", text):
        assert "--require-hashes" in line or not re.search(r" -r ", line), line


def test_the_learner_s_image_puts_flash_attn_4_back_after_flash_attn():
    text = (ROOT / "deploy" / "images" / "gpu-learner.Dockerfile").read_text("utf-8")
    names = ["gpu-learner-3.12.txt", "flash-attn.txt", "flash-attn-4.txt"]
    assert re.findall(r"-r /build/(\S+)", text) == names


def test_there_is_an_image_for_each_kind():
    assert [one.stem for one in IMAGES] == ["cpu", "gpu-generator", "gpu-learner"]
