"""Kubernetes: objects for every role, and a script that makes the keys.

The learner's work ends, so it is a Job, or on several nodes a JobSet: all of its pods are started
again together when one fails, and they have stable names. A LeaderWorkerSet serves for ever: it
would start a learner again whose run is complete.
"""

import shlex
import signal
from importlib.resources import files

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import Layout, layout_of
from slipstream.deploy.interop.render.settings_file import SETTINGS_FILE, settings_text
from slipstream.deploy.interop.render.yaml_text import Yaml, documents
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.metrics import MetricName
from slipstream.wire.settings.load import Table

Object = dict[str, Yaml]
KEYS_SCRIPT = "make-keys.sh"
NOT_APPLIED = ("secrets.template.yaml", "prometheus-adapter.yaml")  # templates for people
_SCRIPT = files("slipstream.deploy.interop.render") / "kubernetes_keys.sh"
_BROKER, _WEIGHTS, _BUCKETS, _RENDEZVOUS, _PAGE, _HEALTH = 5555, 5600, 5601, 29500, 8080, 8081
_RUN, _SHARED, _KEYS, _SECRET, _SETTINGS, _SOCKETS = (
    *("/run-volume", "/shared", "/run/keys", "/run/secret", "/etc/slipstream"),
    "/run/slipstream",
)
_BAD_SETTINGS, _SUPERSEDED = 2, 3
_RESTARTS = 20  # limit for the learner, which resumes each time
_METRIC = "slipstream_lack_of_ready_groups"
_COPY_KEYS = "install -m 0600 /run/secret/* /run/keys/"
_COPY_KEY_OF_NODE = """key=role.key
[ "$NODE" = 0 ] || key=part.key
install -m 0600 "/run/secret/$key" /run/keys/role.key"""
_NAME_WAIT_S = 60  # wait until a pod's own name is known; the learner would refuse an unknown one
_TOLD_TO_END = f"""\
asked=0 learner=''
trap 'asked={128 + signal.SIGTERM}; [ -z "$learner" ] || kill -TERM "$learner"' TERM
"$@" &
learner=$!
[ "$asked" = 0 ] || kill -TERM "$learner"
while :; do # a signal ends `wait` early
    wait "$learner"
    code=$?
    kill -0 "$learner" 2>/dev/null || break
done
[ "$code" != 0 ] || code=$asked
exit "$code"
"""


def render_kubernetes(config: RunConfig, there: Table) -> dict[str, str]:
    """Return the files of a run; ``there`` are the settings with paths of the cluster.

    Raises:
        ConfigError: the run does not fit on such nodes, or its name cannot be that of an object.
    """
    settings = config.deploy.kubernetes
    layout = layout_of(
        config,
        gpus_per_node=settings.gpus_per_node,
        generators_per_node=1,
        setting="deploy.kubernetes.gpus_per_node",
    )
    name = config.run.name.lower()
    plain = name.replace("-", "a")
    if not (plain.isalnum() and plain.isascii() and name[0].isalpha() and name[-1] != "-"):
        raise ConfigError(
            "run.name must consist of letters, digits and dashes and begin with a letter, for the "
            f"names of objects in Kubernetes, got {config.run.name!r}"
        )
    if len(name) > 30:
        raise ConfigError(f"run.name must have at most 30 letters for Kubernetes, got {name!r}")
    return Rendering(config, layout, name, there).files()


class Rendering:
    """The objects of one run."""

    def __init__(self, config: RunConfig, layout: Layout, name: str, there: Table) -> None:
        self._config = config
        self._settings = config.deploy.kubernetes
        self._layout = layout
        self._name = name
        self._there = there
        self._uses_gpus = config.generators.device != "cpu"

    def files(self) -> dict[str, str]:
        """Return texts by file name."""
        named = f"Written by `slipstream render kubernetes` for the run {self._config.run.name}."
        texts = {
            "settings.yaml": documents(self._config_map(), head=named),
            "secrets.template.yaml": documents(*self._secret_templates(), head=_SECRETS_HEAD),
            "broker.yaml": documents(*self._broker(), head=named),
            "learner.yaml": documents(*self._learner(), head=f"{named}\n{self._why_job}"),
            "generators.yaml": documents(*self._generators(), head=named),
            "network.yaml": documents(*self._network(), head=_NETWORK_HEAD),
            "prometheus-adapter.yaml": documents(self._adapter_rule(), head=_ADAPTER_HEAD),
            KEYS_SCRIPT: self._keys_script(),
        }
        if self._layout.reward_workers:
            texts["reward-workers.yaml"] = documents(*self._reward_workers(), head=named)
        return texts

    @property
    def _why_job(self) -> str:
        return (
            "The learner ends with the run, so it is a Job."
            if len(self._layout.learner) == 1
            else "The learner ends with the run, so it is a JobSet (jobset.x-k8s.io, to be "
            "installed in\nthe cluster), whose pods are started again together."
        )

    # ---- parts that several objects have -----------------------------------------

    def _labels(self, role: str) -> dict[str, Yaml]:
        return {"app.kubernetes.io/part-of": f"slipstream-{self._name}", "slipstream-role": role}

    def _object(self, version: str, kind: str, role: str, **fields: Yaml) -> Object:
        return {
            "apiVersion": version,
            "kind": kind,
            "metadata": {
                "name": f"{self._name}-{role}",
                "namespace": self._settings.namespace,
                "labels": self._labels(role),
            },
            **fields,
        }

    def _pod(
        self,
        role: str,
        command: list[str],
        *,
        grace_s: int,
        gpus: int = 0,
        restarts: str = "Always",
        probed: bool = True,
        environment: tuple[Yaml, ...] = (),
        volumes: tuple[Object, ...] = (),
        mounts: tuple[Object, ...] = (),
        keys_script: str = _COPY_KEYS,
    ) -> Object:
        """Return a pod; its keys are copied into memory, where their owner alone can read them."""
        user = self._settings.user
        image = self._settings.images.get(role, self._settings.image)
        own: list[Yaml] = [
            _volume("settings", configMap={"name": f"{self._name}-settings"}),
            _volume(
                "secret", secret={"secretName": f"{self._name}-{role}-keys", "defaultMode": 0o400}
            ),
            _volume("keys", emptyDir={"medium": "Memory", "sizeLimit": "1Mi"}),
            _volume("sockets", emptyDir={"medium": "Memory", "sizeLimit": "16Mi"}),
            _volume("tmp", emptyDir={}),
            _volume(
                "shm", emptyDir={"medium": "Memory", "sizeLimit": self._settings.shared_memory}
            ),
            _volume("shared", persistentVolumeClaim={"claimName": self._settings.shared_claim}),
            *volumes,
        ]
        private: Yaml = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        probe: Object = {}
        if probed:  # how long a start takes has limits of its own: it is live from the beginning
            probe = {
                "startupProbe": _probe("live", 60),
                "livenessProbe": _probe("live", 6),
                "readinessProbe": _probe("ready", 1),
            }
        container: Object = {
            "name": role,
            "image": image,
            "command": [*command, "--health", str(_HEALTH)],
            "env": [
                _from_pod("POD_NAME", "metadata.name"),
                _from_pod("POD_IP", "status.podIP"),
                {"name": "OMP_NUM_THREADS", "value": "1"},
                {"name": "HOME", "value": "/tmp"},  # noqa: S108 of the container
                *environment,
            ],
            "workingDir": _SHARED,
            **probe,
            "securityContext": private,
            **({"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}),
            "volumeMounts": [
                _mount("settings", _SETTINGS, readOnly=True),
                _mount("keys", _KEYS),
                _mount("sockets", _SOCKETS),
                _mount("tmp", "/tmp"),  # noqa: S108 of the container
                _mount("shm", "/dev/shm"),  # noqa: S108 of the container
                _mount("shared", _SHARED),
                *mounts,
            ],
        }
        copy: Object = {
            "name": "copy-keys",
            "image": image,
            "command": ["sh", "-ec", f"umask 077\n{keys_script}\n"],
            "env": list(environment),
            "securityContext": private,
            "volumeMounts": [
                _mount("secret", _SECRET, readOnly=True),
                _mount("keys", _KEYS),
                *mounts,
            ],
        }
        return {
            "metadata": {"labels": self._labels(role)},
            "spec": {
                "restartPolicy": restarts,
                "terminationGracePeriodSeconds": grace_s,
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": user,
                    "runAsGroup": user,
                    "fsGroup": user,
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "initContainers": [copy],
                "containers": [container],
                "volumes": own,
            },
        }

    def _role(self, command: str, *words: str) -> list[str]:
        settings = f"{_SETTINGS}/{SETTINGS_FILE}"
        return [command, "--config", settings, *words, f"run.socket_dir={_SOCKETS}/sockets"]

    @property
    def _collective(self) -> tuple[str, ...]:
        """The interface of a pod's collective; at loopback it would fall back to tcp."""
        return ("weightbus.host=$(POD_IP)",) if self._uses_collectives else ()

    def _far_role(self, command: str, *words: str) -> list[str]:
        """Return the command of a role that reaches the broker by its service."""
        broker = f"run.broker=tcp://{self._name}-broker:{_BROKER}"
        key = f"run.key_file={_KEYS}/role.key"
        return [*self._role(command, *words), f"run.dir={_SHARED}/runs", broker, key]

    # ---- settings and keys -------------------------------------------------------

    def _config_map(self) -> Object:
        text = settings_text(self._there)
        return self._object("v1", "ConfigMap", "settings", data={SETTINGS_FILE: text})

    def _secret_templates(self) -> list[Yaml]:
        admitted = ("learner", "learner-part", "generator", "reward-worker")
        names = {
            "broker": ("broker.key", *(f"{name}.toml" for name in admitted), "token"),
            "learner": ("role.key", "part.key"),
            **dict.fromkeys(("generator", "reward-worker"), ("role.key",)),
        }
        return [
            self._object(
                *("v1", "Secret", f"{role}-keys"),
                type="Opaque",
                stringData=dict.fromkeys(keys, f"made by {KEYS_SCRIPT}"),
            )
            for role, keys in names.items()
        ]

    def _keys_script(self) -> str:
        values = {"namespace": self._settings.namespace, "run": self._name}
        lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        return "\n".join(["#!/bin/bash", *lines, ""]) + _SCRIPT.read_text("utf-8")

    # ---- roles -------------------------------------------------------------------

    def _broker(self) -> list[Yaml]:
        claim: Object = {
            "metadata": {"name": "run"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": self._settings.storage}},
                **(
                    {"storageClassName": self._settings.storage_class}
                    if self._settings.storage_class
                    else {}
                ),
            },
        }
        page = f"{_RUN}/{self._config.run.name}/dashboard"
        pod = self._pod(
            "broker",
            [
                *self._role("start-broker"),
                *(
                    f"run.dir={_RUN}",
                    f"broker.keys={_KEYS}",
                    f"broker.listen=tcp://0.0.0.0:{_BROKER}",
                ),
                *("broker.dashboard.host=$(POD_IP)", f"broker.dashboard.port={_PAGE}"),
            ],
            grace_s=self._settings.broker_grace_s,
            mounts=(_mount("run", _RUN),),
            keys_script=(
                "install -m 0600 /run/secret/broker.key /run/keys/\n"
                "install -d -m 0700 /run/keys/authorized\n"
                "install -m 0600 /run/secret/*.toml /run/keys/authorized/\n"
                f"install -d -m 0700 {shlex.quote(page)}\n"
                f"install -m 0600 /run/secret/token {shlex.quote(page + '/token')}"
            ),
        )
        return [
            self._object(
                *("v1", "Service", "broker"),
                spec={
                    "clusterIP": "None",
                    "selector": self._labels("broker"),
                    "ports": [
                        {"name": "roles", "port": _BROKER},
                        {"name": "metrics", "port": _PAGE},
                    ],
                },
            ),
            self._object(
                *("apps/v1", "StatefulSet", "broker"),
                spec={
                    "replicas": 1,
                    "serviceName": f"{self._name}-broker",
                    "selector": {"matchLabels": self._labels("broker")},
                    "template": pod,
                    "volumeClaimTemplates": [claim],
                },
            ),
            self._budget("broker", {"minAvailable": 1}),
        ]

    def _budget(self, role: str, spec: Object) -> Object:
        whole: Object = {**spec, "selector": {"matchLabels": self._labels(role)}}
        return self._object("policy/v1", "PodDisruptionBudget", role, spec=whole)

    def _learner(self) -> list[Yaml]:
        nodes, first = len(self._layout.learner), self._layout.learner[0]
        command = [
            *self._far_role("start-learner", "--resume", "auto"),
            f"weightbus.listen=tcp://$(POD_IP):{_WEIGHTS}",
            *self._collective,
        ]
        several: tuple[Yaml, ...] = ()
        before = _COPY_KEYS
        if nodes > 1:
            leader = f"{self._name}-learner-learner-0-0.{self._name}-learner"
            command += ["--node", "$(NODE)", "--rendezvous", f"{leader}:{_RENDEZVOUS}"]
            number = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            several = (_from_pod("NODE", number),)
            known = f"until getent hosts {leader}; do sleep 1; done"
            before = (
                f"{_COPY_KEY_OF_NODE}\ntimeout {_NAME_WAIT_S} sh -c {shlex.quote(known)} || true"
            )
        pod = self._pod(
            "learner",
            # a learner that saved at its eviction exits with 0, which would complete its Job
            ["sh", "-c", _TOLD_TO_END, "sh", *command],
            grace_s=self._settings.learner_grace_s,
            gpus=len(first.gpus),
            restarts="Never",
            probed=nodes == 1,  # only rank 0 serves health
            environment=several,
            keys_script=before,
        )
        refused: Object = {  # bad settings, or another learner in its place
            "containerName": "learner",
            "operator": "In",
            "values": [_BAD_SETTINGS, _SUPERSEDED],
        }
        evicted: Object = {"type": "DisruptionTarget", "status": "True"}
        rules: list[Yaml] = [{"action": "FailJob", "onExitCodes": refused}]
        if nodes == 1:  # a lost node is no fault of the learner
            rules.append({"action": "Ignore", "onPodConditions": [evicted]})
        job: Object = {
            "backoffLimit": _RESTARTS if nodes == 1 else 0,
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "podFailurePolicy": {"rules": rules},
            "template": pod,
        }
        # an eviction does not wait: the learner saves and resumes elsewhere
        budget = self._budget("learner", {"maxUnavailable": 1})
        if nodes == 1:
            return [self._object("batch/v1", "Job", "learner", spec=job), budget]
        final: Object = {
            "name": "refused",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],  # reason of the rule above
        }
        jobs: Object = {
            "failurePolicy": {"maxRestarts": _RESTARTS, "rules": [final]},
            "network": {"enableDNSHostnames": True, "subdomain": f"{self._name}-learner"},
            "replicatedJobs": [{"name": "learner", "replicas": 1, "template": {"spec": job}}],
        }
        version = "jobset.x-k8s.io/v1alpha2"
        return [self._object(version, "JobSet", "learner", spec=jobs), budget]

    def _generators(self) -> list[Yaml]:
        size = self._config.generators.generators.num_ranks if self._uses_gpus else 0
        count = len(self._layout.generators)
        pod = self._pod(
            "generator",
            [*self._far_role("start-generator", "--name", "$(POD_NAME)"), *self._collective],
            grace_s=self._settings.generator_grace_s,
            gpus=size,
        )
        objects: list[Yaml] = [
            self._object(
                *("apps/v1", "Deployment", "generator"),
                spec={
                    "replicas": count,
                    "selector": {"matchLabels": self._labels("generator")},
                    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0}},
                    "template": pod,
                },
            ),
            self._budget("generator", {"maxUnavailable": 1}),
        ]
        if self._settings.max_generators > count:
            objects.append(self._autoscaler(count))
        return objects

    def _autoscaler(self, count: int) -> Object:
        """Return the autoscaler that adds generators while few groups are ready.

        An autoscaler adds while a metric is above its target, so the metric is the lack of groups.
        """
        return self._object(
            *("autoscaling/v2", "HorizontalPodAutoscaler", "generator"),
            spec={
                "scaleTargetRef": {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "name": f"{self._name}-generator",
                },
                "minReplicas": max(1, count),
                "maxReplicas": self._settings.max_generators,
                "metrics": [
                    {
                        "type": "Object",
                        "object": {
                            "metric": {"name": _METRIC},
                            "describedObject": {
                                "apiVersion": "v1",
                                "kind": "Service",
                                "name": f"{self._name}-broker",
                            },
                            "target": {"type": "Value", "value": "1"},
                        },
                    }
                ],
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
            },
        )

    def _adapter_rule(self) -> Object:
        series = MetricName.QUEUE_DEPTH.exported
        wanted = self._settings.ready_groups
        rule: Object = {
            "seriesQuery": f'{series}{{queue="ready",namespace!="",service!=""}}',
            "resources": {
                "overrides": {
                    "namespace": {"resource": "namespace"},
                    "service": {"resource": "service"},
                }
            },
            "name": {"as": _METRIC},
            "metricsQuery": (
                f"clamp_max({wanted} / clamp_min(sum("
                '<<.Series>>{queue="ready",<<.LabelMatchers>>}'  # the matchers hold no queue
                ") by (<<.GroupBy>>), 1), 4)"
            ),
        }
        text = documents({"rules": [rule]})
        return self._object("v1", "ConfigMap", "adapter-rule", data={"config.yaml": text})

    def _reward_workers(self) -> list[Yaml]:
        pod = self._pod(
            "reward-worker",
            self._far_role("start-reward-worker", "--name", "$(POD_NAME)"),
            grace_s=self._settings.reward_worker_grace_s,
        )
        return [
            self._object(
                *("apps/v1", "Deployment", "reward-worker"),
                spec={
                    "replicas": self._layout.reward_workers,
                    "selector": {"matchLabels": self._labels("reward-worker")},
                    "template": pod,
                },
            ),
            self._budget("reward-worker", {"maxUnavailable": 1}),
        ]

    # ---- network -----------------------------------------------------------------

    def _network(self) -> list[Yaml]:
        def peers(*roles: str) -> list[Yaml]:
            return [{"podSelector": {"matchLabels": self._labels(role)}} for role in roles]

        def policy(role: str, *rules: Yaml) -> Object:
            spec: Object = {
                "podSelector": {"matchLabels": self._labels(role)},
                "policyTypes": ["Ingress"],
                "ingress": list(rules),
            }
            return self._object("networking.k8s.io/v1", "NetworkPolicy", role, spec=spec)

        others = ("learner", "generator", "reward-worker")
        everywhere: Yaml = [{"namespaceSelector": {}}]
        learner: list[Yaml] = [
            {"from": peers("generator"), "ports": [{"port": _WEIGHTS}, {"port": _BUCKETS}]}
        ]
        if len(self._layout.learner) > 1 or self._uses_collectives:
            far = ("learner", "generator") if self._uses_collectives else ("learner",)
            learner.append({"from": peers(*far)})  # torch's: the system chooses the ports
        generator: list[Yaml] = [{"from": peers("learner")}] if self._uses_collectives else []
        return [
            policy(
                "broker",
                {"from": peers(*others), "ports": [{"port": _BROKER}]},
                {"from": everywhere, "ports": [{"port": _PAGE}]},  # the page asks for a token
            ),
            policy("learner", *learner),
            policy("generator", *generator),
            policy("reward-worker"),
        ]

    @property
    def _uses_collectives(self) -> bool:
        return self._config.learner.weightbus.transport == "collective"


def _probe(word: str, failures: int) -> Object:
    command = ("python", "-m", "slipstream.wire.process.health", "--port", str(_HEALTH), word)
    return {
        "exec": {"command": list(command)},
        "periodSeconds": 10,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


def _volume(name: str, **source: Yaml) -> Object:
    return {"name": name, **source}


def _mount(name: str, path: str, **options: Yaml) -> Object:
    return {"name": name, "mountPath": path, **options}


def _from_pod(name: str, field: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


_SECRETS_HEAD = f"""\
A template: do not apply it. {KEYS_SCRIPT} makes the keys and loads these secrets; no file that
`slipstream render` writes holds one."""
_NETWORK_HEAD = """\
Who may connect to whom. The broker's port and the learner's two are authenticated and encrypted,
torch's (between learner nodes, and in collectives) are not: keep these policies in force."""
_ADAPTER_HEAD = """\
A rule for prometheus-adapter (rules.custom of its values): how many times too few groups are ready,
1 where there are deploy.kubernetes.ready_groups. Prometheus has to scrape port 8080 of the broker
with the token in the secret of the broker's keys as its bearer token."""
