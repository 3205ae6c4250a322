"""Kubernetes: objects for every role, and a script that makes the keys.

The learner's work ends, so it is a Job, or on several nodes a JobSet: all of its pods are started
again together when one fails, and they have stable names. A LeaderWorkerSet never completes: it
would start the learner of a complete run again.
"""

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import NodeLayout, layout_of, transport_of
from slipstream.deploy.interop.render.settings_file import settings_text
from slipstream.deploy.interop.render.template import FilledText, Value, fill
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.metrics import MetricName
from slipstream.wire.settings.load import Table

KEYS_SCRIPT = "make-keys.sh"
NOT_APPLIED = ("secrets.template.yaml", "prometheus-adapter.yaml")  # templates for people


def render_kubernetes(config: RunConfig, there: Table) -> dict[str, str]:
    """Return the files of a run; ``there`` are the settings with the cluster's paths.

    Raises:
        ConfigError: The run needs larger nodes, or its name is no name for objects.
    """
    layout = layout_of(
        config,
        gpus_per_node=config.deploy.kubernetes.gpus_per_node,
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
    return Manifests(config, layout).files(there)


class Manifests:
    """The objects of one run, from the files in templates/kubernetes/."""

    def __init__(self, config: RunConfig, layout: NodeLayout) -> None:
        self._config = config
        self._settings = config.deploy.kubernetes
        self._layout = layout
        self._run = config.run.name.lower()
        self._keys = fill("kubernetes/copy-keys.sh")
        self._dials_learner = transport_of(config).dials_host
        self._host = "weightbus.host=$(POD_IP)" if self._dials_learner else None

    def files(self, there: Table) -> dict[str, str]:
        """Return texts by file name; ``there`` are the settings in the cluster."""
        rule = self._object(
            "prometheus-adapter",
            labels=self._labels("adapter-rule"),
            series=MetricName.QUEUE_DEPTH.exported,
            ready_groups=self._settings.ready_groups,
        )
        manifests = {
            "settings.yaml": self._object(
                "settings", labels=self._labels("settings"), settings=settings_text(there)
            ),
            "secrets.template.yaml": self._object("secrets", **self._labels_by_role("-keys")),
            "broker.yaml": self._broker(),
            "learner.yaml": self._learner(),
            "generators.yaml": self._generators(),
            "network.yaml": self._network(),
            "prometheus-adapter.yaml": rule,
        }
        if self._layout.reward_workers:
            manifests["reward-workers.yaml"] = self._reward_workers()
        title = f"# Written by `slipstream render kubernetes` for the run {self._config.run.name}."
        return {
            **{name: f"{title}\n{text}" for name, text in manifests.items()},
            KEYS_SCRIPT: self._fill("make-keys.sh", namespace=self._settings.namespace),
        }

    def _fill(self, file: str, **values: Value) -> FilledText:
        return fill(f"kubernetes/{file}", run=self._run, **values)

    def _object(self, file: str, **values: Value) -> FilledText:
        return self._fill(f"{file}.yaml", namespace=self._settings.namespace, **values)

    def _labels(self, role: str) -> Value:
        return {"app.kubernetes.io/part-of": f"slipstream-{self._run}", "slipstream-role": role}

    def _labels_by_role(self, suffix: str = "") -> dict[str, Value]:
        roles = ("broker", "learner", "generator", "reward-worker")
        return {role.replace("-", "_"): self._labels(role + suffix) for role in roles}

    def _pod(
        self,
        role: str,
        grace_s: int,
        copy_keys: FilledText,
        *,
        restarts: str = "Always",
        node: str | None = None,
        volume: str | None = None,
    ) -> dict[str, Value]:
        """Return what the files of all roles have holes for.

        Args:
            role: Role of the container.
            grace_s: Time from SIGTERM to SIGKILL.
            copy_keys: Script of the init container.
            restarts: Policy for a container that ended.
            node: Variable for the node's number, if the role is on several.
            volume: Volume of this role alone.
        """
        settings = self._settings
        image = settings.images.get(role, settings.image)
        pod = self._fill(
            "pod.yaml",
            role=role,
            image=image,
            user=settings.user,
            grace_s=grace_s,
            restarts=restarts,
            copy_keys=copy_keys,
            node=node,
            volume=volume,
            shared_memory=settings.shared_memory,
            shared_claim=settings.shared_claim,
        )
        return {
            "labels": self._labels(role),
            "image": image,
            "pod": pod,
            "container": fill("kubernetes/container.yaml", node=node, volume=volume),
            "probes": None if node else fill("kubernetes/probes.yaml"),  # only node 0 serves health
        }

    def _budget(self, role: str, limit: str = "maxUnavailable") -> FilledText:
        return self._object("budget", role=role, labels=self._labels(role), limit=limit)

    def _broker(self) -> str:
        settings = self._settings
        keys = fill("kubernetes/copy-broker-keys.sh", run_name=self._config.run.name)
        broker = self._object(
            "broker",
            storage=settings.storage,
            storage_class=settings.storage_class or None,
            **self._pod("broker", settings.broker_grace_s, keys, volume="run"),
        )
        return broker + self._budget("broker", "minAvailable")

    def _learner(self) -> str:
        nodes = len(self._layout.learner)
        leader = f"{self._run}-learner-learner-0-0.{self._run}-learner"
        file, keys, node, rank = "learner", self._keys, None, None
        if nodes > 1:
            file, node = "learner-nodes", "NODE"
            keys = fill("kubernetes/copy-node-key.sh", leader=leader)
            rank = ["--node", "$(NODE)", "--rendezvous", f"{leader}:29500"]
        grace_s = self._settings.learner_grace_s
        template = self._fill(
            "learner-pod.yaml",
            end=fill("kubernetes/learner-end.sh"),
            weightbus_host=self._host,
            rank=rank,
            gpus=len(self._layout.learner[0].gpus) or None,
            **self._pod("learner", grace_s, keys, restarts="Never", node=node),
        )
        learner = self._object(file, labels=self._labels("learner"), nodes=nodes, template=template)
        # an eviction does not wait: the learner saves and resumes elsewhere
        return learner + self._budget("learner")

    def _generators(self) -> str:
        settings, count = self._settings, len(self._layout.generators)
        uses_gpus = self._config.generators.device != "cpu"
        generators = self._object(
            "deployment",
            role="generator",
            count=count,
            max_surge=0,
            weightbus_host=self._host,
            gpus=self._config.generators.generators.num_ranks if uses_gpus else None,
            **self._pod("generator", settings.generator_grace_s, self._keys),
        )
        autoscaler = self._object(
            "autoscaler",
            labels=self._labels("generator"),
            min_replicas=max(1, count),
            max_replicas=settings.max_generators,
        )
        scales = settings.max_generators > count
        return generators + self._budget("generator") + (autoscaler if scales else "")

    def _reward_workers(self) -> str:
        workers = self._object(
            "deployment",
            role="reward-worker",
            count=self._layout.reward_workers,
            max_surge=None,
            weightbus_host=None,
            gpus=None,
            **self._pod("reward-worker", self._settings.reward_worker_grace_s, self._keys),
        )
        return workers + self._budget("reward-worker")

    def _network(self) -> str:
        labels = self._labels_by_role()

        def rules(*roles: str) -> list[Value]:
            """Allow roles every port: torch lets the system choose its ports."""
            return [{"from": [{"podSelector": {"matchLabels": labels[role]}} for role in roles]}]

        to_learner, to_generator = None, []
        if self._dials_learner:
            to_learner, to_generator = rules("learner", "generator"), rules("learner")
        elif len(self._layout.learner) > 1:
            to_learner = rules("learner")
        return self._object("network", to_learner=to_learner, to_generator=to_generator, **labels)
