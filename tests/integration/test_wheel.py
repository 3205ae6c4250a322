"""The wheel in an environment without extras, called from a folder with a space and an umlaut.

Every command works, or names in one line the extra that it needs.
"""

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.deploy.examples.addition import prepare
from slipstream.deploy.main import COMMANDS
from tests.support.installed import build, install, metadata
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PACKAGES = ("wire", "algos", "broker", "weightbus", "generators", "learner", "deploy")
HEAVY = ("torch", "megatron", "sglang", "tokenizers", "transformers", "pyarrow", "ray", "jinja2")
ROLES = ("broker", "environment", "generator", "learner", "reward-worker")
BOTH = "pip install 'slipstream[learner,generators"
LEARNER = "torch is not installed: pip install 'slipstream[learner]'"
GENERATORS = "is not installed: pip install 'slipstream[generators]'"
NO_RUN = "no run in "
QUICKSTART = "--config configs/quickstart.toml"  # that of the wheel
SHAPE = "--gpu H100 --model Qwen3-30B-A3B"
SUMS = (
    "environment.function=slipstream.deploy.examples.sums:Sums generators.siblings_together=false"
)
SCORE = "slipstream.broker.rewards.exact_match:score"
VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet"

CALLS: dict[str, tuple[int, str]] = {  # exit code, and a part of what is printed
    "slipstream": (2, "required: COMMAND"),
    "slipstream --version": (0, "slipstream "),
    "slipstream completion bash": (0, "complete -o bashdefault"),
    "slipstream completion zsh": (0, "compdef _shtab_slipstream"),
    "slipstream completion fish": (0, "complete -c slipstream"),
    "slipstream metrisc": (2, "did you mean metrics?"),
    "start-learner --version": (0, "start-learner "),
    "slipstream quickstart": (2, BOTH),
    "slipstream quickstart --agent": (2, BOTH),
    f"slipstream run {QUICKSTART}": (2, BOTH),
    f"slipstream run {QUICKSTART} --dry-run": (2, BOTH),
    f"slipstream run {QUICKSTART} --on ray": (2, "pip install 'slipstream[cluster]'"),
    f"slipstream run {QUICKSTART} --on hosts run.dir=elsewhere": (0, "start-broker"),
    f"slipstream run {QUICKSTART} data.file=a.parquet data.as_chatt=true": (2, "as_chat"),
    f"slipstream check {QUICKSTART}": (2, BOTH),
    "slipstream align .cache/addition/model": (2, BOTH),
    f"slipstream plan {QUICKSTART} --memory": (2, LEARNER),
    f"slipstream plan {QUICKSTART} --measure": (2, LEARNER),
    "slipstream plan": (2, "name one settings file"),
    "slipstream simulate --gpu H100": (2, "name one settings file"),
    f"slipstream simulate {QUICKSTART} {SHAPE} --steps 2": (0, "predicted"),
    f"slipstream plan {QUICKSTART}": (2, LEARNER),
    "slipstream plan --publish": (0, "commands to agents"),
    f"slipstream render slurm {QUICKSTART} --out job": (0, "job.sbatch"),
    f"slipstream render compose {QUICKSTART} --out compose": (0, "compose"),
    "slipstream scale generators=2": (2, NO_RUN),
    "slipstream serve": (2, "name one settings file"),
    f"slipstream serve {QUICKSTART}": (2, "has no section [serve]"),
    "slipstream top": (2, NO_RUN),
    "slipstream plan --advise": (2, NO_RUN),
    "slipstream dashboard": (2, NO_RUN),
    "slipstream metrics": (2, NO_RUN),
    "slipstream metrics --csv": (2, NO_RUN),
    "slipstream show": (2, NO_RUN),
    "slipstream ledger": (2, NO_RUN),
    "slipstream trace": (2, NO_RUN),
    "slipstream dead-letters list": (2, NO_RUN),
    "slipstream export": (2, NO_RUN),
    f"slipstream replay {QUICKSTART}": (2, NO_RUN),
    f"slipstream replay a.trajectories {QUICKSTART}": (2, "is not a trajectory file"),
    "slipstream data check .cache/addition/train.jsonl": (0, "no bad rows"),
    f"slipstream data check {QUICKSTART}": (2, GENERATORS),
    f"slipstream reward test --data .cache/addition/train.jsonl --reward {SCORE}": (0, "version"),
    f"slipstream env try {QUICKSTART} {SUMS}": (2, GENERATORS),
    "slipstream keys make desk --role operator --keys keys": (0, "desk"),
    "slipstream keys list --keys keys": (0, "desk"),
    "slipstream import-verl": (2, "required"),
    "slipstream import-verl none.yaml": (2, "none.yaml"),
    "slipstream import-verl verl.sh": (2, "--run verl.sh"),
    f"slipstream import-verl --out verl.toml -- {VERL}": (0, "verl.toml"),
    f"start-broker {QUICKSTART} --dry-run": (0, "quickstart"),
    f"start-learner {QUICKSTART}": (2, LEARNER),
    f"start-learner {QUICKSTART} --dry-run": (2, LEARNER),
    f"start-generator {QUICKSTART}": (2, GENERATORS),
    f"start-generator {QUICKSTART} --offline --out a.trajectories": (2, GENERATORS),
    f"start-reward-worker {QUICKSTART} --dry-run": (0, SCORE),
    "start-reward-worker": (2, "which broker?"),
    f"start-environment {QUICKSTART} --listen 127.0.0.1:7100": (2, "environment.function"),
}


class Installed(NamedTuple):
    """What is built, and where it is installed."""

    sdist: Path
    wheel: Path
    programs: Path
    folder: Path  # that commands are called in

    def call(self, line: str) -> "subprocess.CompletedProcess[str]":
        """Call a command of the environment; its home is an empty folder."""
        program, *words = line.split()
        home = self.folder.parent / "home"
        return subprocess.run(
            [self.programs / program, *words],
            cwd=self.folder,
            env={"PATH": os.defpath, "HOME": str(home), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    top = tmp_path_factory.mktemp("wheel")
    folder = top / "ä b"
    (top / "home").mkdir()
    sdist, wheel = build(top)
    prepare(folder / ".cache" / "addition")
    (folder / "verl.sh").write_text(f"{VERL}\n")
    return Installed(sdist, wheel, install(wheel, top / "ü c"), folder)


def test_nothing_of_the_extras_can_be_imported_there(installed: Installed):
    code = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    done = subprocess.run(
        [installed.programs / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_wheel_holds_every_module_and_all_package_data(installed: Installed):
    with zipfile.ZipFile(installed.wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    files = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    modules = {Path("slipstream") / path for path in files}
    assert {name for name in names if name.suffix == ".py"} - {Path("slipstream/__init__.py")} == (
        modules
    )
    data = [Path("py.typed"), *sorted((ROOT / "configs").glob("*.toml"))]
    for folder, pattern in (
        ("broker/dashboard/page", "**/*"),
        ("deploy", "*.json"),
        ("deploy", "*.yaml"),
        ("deploy", "constraints-*.txt"),
        ("deploy/interop/render/templates", "**/*"),
        ("deploy/examples", "*_policy/*"),
    ):
        found = [path for path in (ROOT / folder).glob(pattern) if path.is_file()]
        assert found, (folder, pattern)
        data += found
    missing = {path for path in data if "slipstream" / _relative(path) not in names}
    assert missing == set()


def _relative(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_absolute() else path


def test_the_source_distribution_holds_the_settings_and_no_development_files(installed: Installed):
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/slipstream/py.typed"} <= names
    assert "src/slipstream/configs/quickstart.toml" in names
    tops = {name.partition("/")[0] for name in names if name} - {"PKG-INFO", "setup.cfg"}
    assert tops == {"pyproject.toml", "README.md", "LICENSE", "src"}


def test_metadata_say_what_it_is(installed: Installed):
    fields = metadata(installed.wheel)
    assert "Typing :: Typed" in fields["Classifier"]
    assert fields["License-Expression"] == ["Apache-2.0"]
    assert fields["Author"]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_of_a_command_needs_no_extra(installed: Installed, command: str):
    done = installed.call(f"slipstream {command} --help")
    assert done.returncode == 0, done.stdout
    assert f"\n  slipstream {command}" in done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_help_of_a_role_needs_no_extra(installed: Installed, role: str):
    done = installed.call(f"start-{role} --help")
    assert done.returncode == 0, done.stdout
    assert f"\n  start-{role}" in done.stdout


@pytest.mark.parametrize("line", list(CALLS))
def test_a_command_works_or_names_its_extra(installed: Installed, line: str):
    code, part = CALLS[line]
    done = installed.call(line)
    assert "Traceback" not in done.stdout, done.stdout
    assert done.returncode == code, done.stdout
    assert part in done.stdout
    if code == 2 and "pip install" in part:
        assert sum("pip install" in said for said in done.stdout.splitlines()) == 1


def test_every_command_is_called():
    called = {line.split()[1] for line in CALLS if line.startswith("slipstream ")}
    missing = sorted(set(COMMANDS) - called)
    assert not missing, (
        f"CALLS above has no line of {', '.join(missing)}: add how it is called where the base "
        "alone is installed and no run exists, with its exit code and a part of what it prints"
    )
    assert called - set(COMMANDS) == {"--version", "metrisc"}
    assert {line.split()[0] for line in CALLS} == {
        "slipstream",
        *(f"start-{role}" for role in ROLES),
    }


def test_commands_write_into_the_folder_they_are_called_in_alone(installed: Installed):
    home = installed.folder.parent / "home"
    assert list(home.iterdir()) == []
    assert {path.name for path in installed.folder.iterdir()} <= {
        *(".cache", "elsewhere", "job", "compose", "keys", "verl.sh", "verl.toml")
    }
