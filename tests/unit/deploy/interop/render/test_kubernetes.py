"""The objects that Kubernetes gets: its schemas accept them, and they hold what a run needs."""

import copy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.broker.server.keyring import BrokerKey, KeyRing, broker_key
from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.kubernetes import KEYS_SCRIPT, Manifests, render_kubernetes
from slipstream.deploy.interop.render.layout import NodeGpus, NodeLayout
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.messages.metrics import MetricName
from tests.support.config_to_render import config_to_render
from tests.support.kubernetes_objects import faults

ROOT = Path(__file__).parents[5]
Objects = dict[tuple[str, str], dict[str, Any]]


def config_of(folder: Path, **sections: dict[str, object]) -> RunConfig:
    sections["run"] = {"dir": str(folder), **sections.get("run", {})}
    return config_to_render(folder, count=3, **sections)


def objects_of(texts: dict[str, str]) -> Objects:
    found: Objects = {}
    for name, text in texts.items():
        if name.endswith(".yaml"):
            for thing in yaml.safe_load_all(text):
                found[thing["kind"], thing["metadata"]["name"]] = thing
    return found


def container(thing: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = thing["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return config_of(tmp_path, deploy={"kubernetes": {"max_generators": 8, "namespace": "rl"}})


@pytest.fixture
def texts(config: RunConfig) -> dict[str, str]:
    return render_kubernetes(config, config.table)


@pytest.fixture
def objects(texts: dict[str, str]) -> Objects:
    return objects_of(texts)


def test_kubernetes_accepts_every_object(objects: Objects):
    assert len(objects) == 20
    for name, thing in objects.items():
        assert faults(thing) == [], name
        assert thing["metadata"]["namespace"] == "rl"


def test_a_misspelled_field_would_be_found(objects: Objects):
    wrong = copy.deepcopy(objects["Deployment", "demo-generator"])
    container(wrong)["livenesProbe"] = {}
    assert "livenesProbe" in faults(wrong)[0]


def test_a_learner_on_several_nodes_is_a_job_set(config: RunConfig):
    learner = (NodeGpus(0, (0, 1)), NodeGpus(1, (0, 1)))
    layout = NodeLayout(learner, (NodeGpus(2, (0,)),), reward_workers=1)
    things = objects_of(Manifests(config, layout).files(config.table))
    jobs = things["JobSet", "demo-learner"]
    assert faults(jobs) == []
    job = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    words = container(job | {"spec": job})["command"]
    where = words[words.index("--rendezvous") + 1]
    assert where == "demo-learner-learner-0-0.demo-learner:29500"
    assert words[words.index("--node") + 1] == "$(NODE)"
    copy = job["template"]["spec"]["initContainers"][0]["command"][2]
    assert copy.splitlines()[2:4] == [
        '[ "$NODE" = 0 ] || key=part.key',
        'install -m 0600 "/run/secret/$key" /run/keys/role.key',
    ]
    waits = copy.splitlines()[-1].replace("demo-learner-learner-0-0.demo-learner", "localhost")
    assert "localhost" in waits, "node 0 refuses an address that it does not know yet"
    done = subprocess.run(["sh", "-ec", waits], capture_output=True, text=True, check=True)
    assert "localhost" in done.stdout
    (final,) = jobs["spec"]["failurePolicy"]["rules"]
    refused = job["podFailurePolicy"]["rules"][0]
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert final["action"] == "FailJobSet", "all would be started again, to be refused again"
    assert final["onJobFailureReasons"] == ["PodFailurePolicy"]
    peers = things["NetworkPolicy", "demo-learner"]["spec"]["ingress"]
    assert peers[1]["from"][0]["podSelector"]["matchLabels"]["slipstream-role"] == "learner"
    assert "ports" not in peers[1], "torch's ports are the system's choice"


def test_gpus_ports_and_graces_are_those_of_the_run(objects: Objects):
    learner, generator = objects["Job", "demo-learner"], objects["Deployment", "demo-generator"]
    assert container(learner)["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container(generator)["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert generator["spec"]["replicas"] == 3
    assert "resources" not in container(objects["StatefulSet", "demo-broker"])
    graces = {
        name: thing["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for (kind, name), thing in objects.items()
        if "template" in thing.get("spec", {})
    }
    assert graces == {
        "demo-broker": 120,
        "demo-learner": 900,
        "demo-generator": 60,
        "demo-reward-worker": 60,
    }
    allowed = objects["NetworkPolicy", "demo-learner"]["spec"]["ingress"]
    assert [one["port"] for one in allowed[0]["ports"]] == [5600, 5601]
    assert len(allowed) == 1, "nobody reaches torch's ports: the learner is one pod"


@pytest.mark.parametrize(
    ("ends_with", "is_asked", "code"), [(0, False, 0), (2, False, 2), (0, True, 143), (1, True, 1)]
)
def test_a_learner_that_was_asked_to_end_does_not_complete_its_job(
    objects: Objects, tmp_path: Path, ends_with: int, is_asked: bool, code: int
):
    """Beside a stand-in for start-learner that saves at SIGTERM, as on a node that is drained."""
    saves = f'trap "echo saved; exit {ends_with}" TERM; echo began; while :; do sleep 0.02; done'
    body = saves if is_asked else f"exit {ends_with}"
    (tmp_path / "start-learner").write_text(f"#!/bin/bash\n{body}\n")
    (tmp_path / "start-learner").chmod(0o755)
    words = container(objects["Job", "demo-learner"])["command"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        if is_asked:
            assert pod.stdout.readline() == "began\n"
            pod.terminate()
            assert pod.stdout.readline() == "saved\n"
    assert pod.returncode == code
    rules = objects["Job", "demo-learner"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["action"] == "Ignore", "an eviction counts for no failure"


def test_every_pod_is_without_rights_and_probed(objects: Objects):
    pods = [thing for thing in objects.values() if "template" in thing.get("spec", {})]
    assert len(pods) == 4
    for thing in pods:
        spec = thing["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for one in (*spec["containers"], *spec["initContainers"]):
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        for probe, kind in (("livenessProbe", "live"), ("readinessProbe", "ready")):
            assert container(thing)[probe]["exec"]["command"][-1] == kind
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert volumes["keys"]["emptyDir"]["medium"] == "Memory"
        assert volumes["secret"]["secret"]["defaultMode"] == 0o400


def test_the_autoscaler_asks_for_a_metric_that_the_rule_makes_of_ours(objects: Objects):
    scaler = objects["HorizontalPodAutoscaler", "demo-generator"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 8)
    rule = yaml.safe_load(objects["ConfigMap", "demo-adapter-rule"]["data"]["config.yaml"])[
        "rules"
    ][0]
    assert scaler["metrics"][0]["object"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith(MetricName.QUEUE_DEPTH.exported + '{queue="ready"')
    # The adapter fills in namespace and service alone: the other queues must not be added up.
    query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
    assert 'sum(slipstream_queue_depth{queue="ready",<<.LabelMatchers>>}) by' in query


def test_the_settings_are_those_of_the_cluster_and_hold_no_key(config: RunConfig):
    there = {**config.table, "run": {**config.table["run"], "model": "/shared/model"}}
    texts = render_kubernetes(config, there)
    settings = objects_of(texts)["ConfigMap", "demo-settings"]["data"]["run.toml"]
    assert tomllib.loads(settings) == there
    for secret in (thing for key, thing in objects_of(texts).items() if key[0] == "Secret"):
        assert set(secret["stringData"].values()) == {"made by make-keys.sh"}


def test_a_collective_is_on_the_pods_addresses_and_is_let_through(tmp_path: Path):
    config = config_of(tmp_path, weightbus={"transport": "collective"})
    objects = objects_of(render_kubernetes(config, config.table))
    for key in (("Job", "demo-learner"), ("Deployment", "demo-generator")):
        assert "weightbus.host=$(POD_IP)" in container(objects[key])["command"]
        allowed = objects["NetworkPolicy", key[1]]["spec"]["ingress"]
        assert any("ports" not in rule for rule in allowed), "torch's ports are the system's choice"


@pytest.mark.parametrize("name", ["-a", "a_b", "ä", "a" * 31, "1a"])
def test_a_name_that_no_object_can_have_is_refused(tmp_path: Path, name: str):
    config = config_of(tmp_path, run={"name": name})
    with pytest.raises(ConfigError, match=r"run.name must"):
        render_kubernetes(config, config.table)


def test_too_few_gpus_are_refused_with_the_setting(tmp_path: Path):
    config = config_of(tmp_path, deploy={"kubernetes": {"gpus_per_node": 2}})
    with pytest.raises(ConfigError, match=r"deploy.kubernetes.gpus_per_node = 2, .* 4 ranks"):
        render_kubernetes(config, config.table)


KUBECTL = """#!/bin/bash
# kubectl create secret: keeps the files, as a cluster would
[ "$3" = get ] && exit 1
[ "$3 $4 $5" = "create secret generic" ] || exit 1
name=$6; shift 6
for word in "$@"; do
    value=${word#--from-file=}
    mkdir -p "$STORE/$name"
    cp "${value#*=}" "$STORE/$name/${value%%=*}"
    stat -c %a "${value#*=}" >>"$STORE/modes"
done
"""


def test_made_keys_reach_the_pods_private_and_are_taken(texts: dict[str, str], tmp_path: Path):
    """make-keys.sh, then the init containers' commands, in folders instead of volumes."""
    tools, store = tmp_path / "tools", tmp_path / "store"
    tools.mkdir()
    (tools / "kubectl").write_text(KUBECTL)
    (tools / "kubectl").chmod(0o755)
    script = tmp_path / KEYS_SCRIPT
    script.write_text(texts[KEYS_SCRIPT])
    environment = {
        "PATH": f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "STORE": str(store),
        "TMPDIR": str(tmp_path),
    }
    subprocess.run(["bash", script], env=environment, check=True, capture_output=True)
    assert set((store / "modes").read_text().split()) == {"600"}
    assert not list(tmp_path.glob("tmp.*")), "the keys stay in the cluster alone"
    objects = objects_of(texts)
    for role, kind in (("broker", "StatefulSet"), ("generator", "Deployment")):
        pod = objects[kind, f"demo-{role}"]["spec"]["template"]["spec"]
        (tmp_path / role).mkdir(mode=0o700)
        command = pod["initContainers"][0]["command"][2]
        for theirs, ours in (
            ("/run/secret", store / f"demo-{role}-keys"),
            ("/run/keys", tmp_path / role),
            ("/run-volume", tmp_path / "runs"),
        ):
            command = command.replace(theirs, str(ours))
        subprocess.run(["sh", "-ec", command], check=True)
    key = read_client_key(tmp_path / "generator" / "role.key")
    own: BrokerKey = broker_key(tmp_path / "broker")
    assert key.broker == own.public.decode()
    holder = KeyRing(tmp_path / "broker").holder(key.public)
    assert holder is not None
    assert holder.role == "generator"
    assert (tmp_path / "runs" / "demo" / "dashboard" / "token").stat().st_mode & 0o777 == 0o600
