"""`slipstream check` between two hosts (network namespaces): a fault of one of them is named."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from slipstream.deploy.config import run_config
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.preflight.check.facts import HostReport, exit_code
from slipstream.deploy.preflight.check.places import NODE_PROGRAM
from slipstream.deploy.preflight.check.survey import survey
from slipstream.wire.settings.load import load_table
from tests.e2e.hosts import Host, end, toml_of, two_hosts
from tests.support.random_llama import write_random_weights
from tests.support.slow_disk import passed_over
from tests.support.tiny_run import tiny_inputs, tiny_settings, write_policy
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.integration]
CLOCK_90_S_AHEAD = """
import sys, time
if "slipstream.deploy.preflight.check.node" in sys.orig_argv:
    real = time.time
    time.time = lambda: real() + 90.0
"""


@contextmanager
def program_on(host: Host, before: str) -> Iterator[Callable[[bytes, float], bytes]]:
    """Yield what asks the real program on a host; the output of the process is its log."""
    process = subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            host.name,
            "sh",
            "-ec",
            f"{before} exec {shlex.quote(sys.executable)} -m {NODE_PROGRAM}",
        ],
        cwd=host.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=host.environment,
    )

    def ask(request: bytes, _limit_s: float) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the program on the host ended"
        return answer

    try:
        yield ask
    finally:
        with process:  # closes its pipes
            end(process)


class Hosts:
    """Two hosts with the inputs of a run, and what is wrong with the second."""

    def __init__(self, head: Host, far: Host) -> None:
        self.head, self.far = head, far
        self.settings: dict[str, object] = {
            "weightbus.host": "10.77.0.1",
            "weightbus.transport": "collective",
            "generators.count": 1,
        }
        self.before = ""  # what the shell on the second host does first

    def reports(self) -> tuple[HostReport, HostReport]:
        file = self.head.folder / "run.toml"
        file.write_text(toml_of(tiny_settings(self.head.folder) | self.settings))
        with ExitStack() as stack:
            here = stack.enter_context(program_on(self.head, ""))
            there = stack.enter_context(program_on(self.far, self.before))
            posts = [
                *(
                    Post(n, "1", "10.77.0.1", here)
                    for n in ("broker", "learner", "reward-worker-0")
                ),
                Post("generator-0", "2", "10.77.0.2", there),
            ]
            config = run_config(load_table(file))
            first, second = passed_over(survey(config, posts, lambda _what: None))
        return first, second


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as (head, far):
        tiny_inputs(head.folder)
        yield Hosts(head, far)


def trouble(*reports: HostReport) -> list[str]:
    return [fact.line for report in reports for fact in report.facts if fact.outcome != "ok"]


def test_two_sound_hosts_are_compared(hosts: Hosts):
    first, second = hosts.reports()
    assert (exit_code([first, second]), trouble(first, second)) == (0, [])
    assert (first.roles, second.roles) == (
        ("broker", "learner", "reward-worker-0"),
        ("generator-0",),
    )
    found = {fact.name: fact.found for fact in second.facts}
    assert {"versions", "same model", "clock"} <= set(found)
    assert {"data", "prompt", "reward"} <= {fact.name for fact in first.facts}
    assert float(found["clock"].split()[0]) < 1


def another_model(hosts: Hosts, folder: Path) -> None:
    other = folder / "other"
    write_policy(other)
    write_random_weights(other, scale=0.15, seed=4)
    hosts.before = f"mount --bind '{other}' '{hosts.head.folder / 'model'}';"


def another_torch(hosts: Hosts, folder: Path) -> None:
    metadata = folder / "odd" / "torch-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    hosts.far.environment = in_front(hosts.far.environment, folder / "odd")


def clock_ahead(hosts: Hosts, folder: Path) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / "sitecustomize.py").write_text(CLOCK_90_S_AHEAD)
    hosts.far.environment = in_front(hosts.far.environment, folder / "odd")


def in_front(environment: dict[str, str], folder: Path) -> dict[str, str]:
    path = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    return {**environment, "PYTHONPATH": path}


# exit code, the beginning of the one line that is not ok, and what it must hold
FAULTS: dict[Callable[[Hosts, Path], None], tuple[int, str, str]] = {
    another_model: (2, "fail same model: weights is ", "on the learner's (run.model)"),
    another_torch: (2, "fail versions: torch is 1.2.3 here, ", "(weightbus.transport)"),
    clock_ahead: (1, "warn clock: +90.", "expected at most 1 s"),
}


# Faults that stand beside each other.
TOGETHER = [(another_model, another_torch), (clock_ahead,)]


@pytest.mark.parametrize("plants", TOGETHER, ids=lambda plants: plants[0].__name__)
def test_a_fault_of_one_host_is_named_there(
    hosts: Hosts, tmp_path: Path, plants: tuple[Callable[[Hosts, Path], None], ...]
):
    for plant in plants:
        plant(hosts, tmp_path)
    first, second = hosts.reports()
    assert trouble(first) == []
    found = trouble(second)
    assert len(found) == len(plants), found
    assert exit_code([first, second]) == max(FAULTS[plant][0] for plant in plants)
    for _, start, words in (FAULTS[plant] for plant in plants):
        (line,) = [line for line in found if line.startswith(start)]
        missing = [word for word in words.split() if word not in line]
        assert not missing, f"{missing} of {line}"


def commands_on(printed: str, host: str) -> list[str]:
    """Return what is printed to be called on a host."""
    part = printed.partition(f"\non {host}:\n")[2].partition("\non ")[0]
    return [line.strip() for line in part.splitlines() if line.strip()]


def test_what_is_printed_for_several_hosts_checks_them_all(hosts: Hosts):
    """Each host reads its own settings, and all print the same facts."""
    head, far = hosts.head, hosts.far
    settings = {"generators.count": 1, "deploy.hosts": ["head", "far"]}
    (head.folder / "run.toml").write_text(toml_of(tiny_settings(head.folder) | settings))
    far.environment["SLIPSTREAM_TEST_HEAD"] = ""  # what is printed are whole paths
    printed = head.run("slipstream check --config run.toml --on hosts")
    *before, check_here = commands_on(printed, "head")
    *fetch, check_there = commands_on(printed, "far")
    assert (len(before), len(fetch)) == (1, 2), printed
    for command in before:
        head.run(command)
    for command in fetch:
        far.run(command)
    far_output = far.folder / "check.log"
    process = far.start(check_there, far_output)
    try:
        output = head.run(check_here)
        assert process.wait(HANG_S) == 0, far_output.read_text()
    finally:
        end(process)
    assert far_output.read_text() == output
    lines = output.splitlines()
    (there,) = [i for i, line in enumerate(lines) if line.endswith(" (far): generator-0")]
    facts = dict(line[5:].split(": ", 1) for line in lines[there + 1 : -1])
    assert facts["key file"].startswith("far-generator, of the role generator, is known")
    assert facts["versions"].startswith("as on the learner's host: ")
    assert lines[-1].endswith(" ok, 0 warn, 0 fail")
    assert any("broker.listen: 0.0.0.0:5555 is free, on every interface" in line for line in lines)


def test_a_host_that_never_comes_is_named(hosts: Hosts):
    head = hosts.head
    settings = {
        "generators.count": 1,
        "deploy.hosts": ["head", "far"],
        "learner.rendezvous_timeout_s": 0.5,
    }
    (head.folder / "run.toml").write_text(toml_of(tiny_settings(head.folder) | settings))
    head.run("slipstream keys make far --role generator --config run.toml")
    output = head.folder / "check.log"
    command = "slipstream check --config run.toml --on hosts --node 0 --rendezvous 10.77.0.1:29400"
    assert head.start(command, output).wait(HANG_S) == 2
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("fail")]
    assert "far has not answered (learner.rendezvous_timeout_s = 0.5)" in line


def test_a_host_with_a_key_that_the_broker_does_not_know_is_not_heard(hosts: Hosts):
    head, far = hosts.head, hosts.far
    settings = {
        "generators.count": 1,
        "deploy.hosts": ["head", "far"],
        "learner.rendezvous_timeout_s": 5.0,
    }
    (head.folder / "run.toml").write_text(toml_of(tiny_settings(head.folder) | settings))
    head.run("slipstream keys make known --role generator --config run.toml")
    head.run("slipstream keys make other --role generator --config run.toml --keys others")
    command = (
        "slipstream check --config {}/run.toml --on hosts --node {} --rendezvous 10.77.0.1:29400"
    )
    key = f"run.key_file={head.folder}/others/clients/other.key"
    outputs = [head.folder / "head.log", far.folder / "far.log"]
    there = far.start(f"{command.format(head.folder, 1)} {key}", outputs[1])
    here = head.start(command.format(head.folder, 0), outputs[0])
    assert [process.wait(HANG_S) for process in (here, there)] == [2, 2]
    assert "far has not answered" in outputs[0].read_text()
    assert "or proves another key than this one (run.key_file)" in outputs[1].read_text()
