"""docs/clusters.md, followed word for word: a generator on another host than the rest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.deploy.commands.run import run
from tests.e2e.hosts import Host, Roles, toml_of
from tests.support import guide
from tests.support.guide import fences
from tests.support.tiny_run import ROOT, assert_complete, tiny_inputs, tiny_settings

pytestmark = [pytest.mark.e2e]
DOCUMENT = ROOT / "docs" / "clusters.md"
STARTED = ROOT / "docs" / "getting_started.md"


def follow(head: Host, far: Host, on_head: list[str], on_far: list[str]) -> Path:
    """Start roles by commands, the broker's first; return the run folder of the complete run."""
    with Roles() as roles:
        for host, commands in ((head, on_head), (far, on_far)):
            for command in commands:
                name = str(len(roles.processes)) if roles.processes else "broker"
                roles.start(host, name, command)
        roles.end_broker()
    (folder,) = [one for one in (head.folder / "runs").iterdir() if one.name != "keys"]
    assert_complete(folder)
    return folder


@pytest.mark.slow  # tests/e2e/test_remote_roles.py has a generator on another host
def test_two_nodes_run_by_the_documented_commands(hosts: tuple[Host, Host]):
    head, far = hosts
    own = guide.steps(guide.blocks(STARTED, "A task of your own"))
    guide.follow(guide.before_command("--dry-run", own), head.folder)
    in_sums = replace(head, folder=head.folder / "sums")
    kinds, texts = zip(*fences(DOCUMENT, "Two nodes in ten minutes"), strict=True)
    assert kinds == ("toml", *["bash"] * 6)
    section, make_key, broker, learner, worker, fetch, generator = texts
    config = in_sums.folder / "run.toml"
    text = config.read_text() + section.replace("10.0.0.1", "10.77.0.1")
    short = f'[run]\nsocket_dir = "{head.folder.parent / "s"}"\n'
    config.write_text(text.replace("[run]\n", short))  # folders of tests have long names
    in_sums.run(make_key)
    far.run(fetch)
    on_head = [broker.strip(), learner.strip(), worker.strip()]
    folder = follow(in_sums, far, on_head, [generator.strip()])
    assert json.loads((folder / "summary.json").read_text())["steps"] == 20


# Commands for a generator on another host: tests/e2e/test_remote_roles.py. What is printed:
# tests/unit/deploy/launch/test_hosts.py; tests/integration/test_check_hosts.py calls its like.
@pytest.mark.slow
def test_two_hosts_run_by_the_printed_commands(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    head, far = hosts
    config = head.folder / "run.toml"
    places = {"deploy.hosts": ["head", "far"], "generators.device": "cpu"}
    tiny_inputs(head.folder)
    settings = tiny_settings(head.folder) | {
        "run.dir": "runs",
        "run.socket_dir": head.folder.parent / "s",
        "checkpoint.export_at_end": False,
    }
    config.write_text(toml_of(settings | places))
    monkeypatch.chdir(head.folder)
    listen = ["broker.listen=tcp://10.77.0.1:5555", "weightbus.listen=tcp://10.77.0.1:5600"]
    assert run(config, listen, dry_run=False, place="hosts") == 0
    printed = capsys.readouterr().out
    once, roles = parse(printed)
    assert once.keys() == roles.keys() == {"head", "far"}, printed
    for command in once["head"]:
        head.run(command)
    for command in once["far"]:
        far.run(command.replace(f"head:{head.folder}/", "head:"))
    started = [[f"env {one}" for one in roles[host]] for host in ("head", "far")]
    follow(head, far, *started)


def parse(printed: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the commands of each host: those to run once, and those of roles."""
    found: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    commands: list[str] = []
    for line in printed.splitlines():
        if line.startswith("on ") and line.endswith(":"):
            host = line.split()[1].strip(",")
            commands = found[0 if line.endswith("once:") else 1].setdefault(host, [])
        elif line.startswith("  "):
            commands.append(line.strip())
    return found
