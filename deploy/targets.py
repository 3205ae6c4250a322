"""Settings of Ray, and of what `slipstream render` writes files for."""

from typing import Annotated

import msgspec

from slipstream.wire.messages.trajectory import Json
from slipstream.wire.settings.load import Section
from slipstream.wire.settings.sections import AtLeast0, AtLeast1, NotNegative, Positive

_DNS_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"
_TIME = r"^(UNLIMITED|(\d+-)?\d+(:\d{1,2}){0,2})\Z"
DnsName = Annotated[str, msgspec.Meta(pattern=_DNS_NAME)]
SlurmTime = Annotated[str, msgspec.Meta(pattern=_TIME)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_530)]
Overrides = tuple[str, ...]
RoleName = Annotated[str, msgspec.Meta(pattern="^(broker|learner|generator|reward-worker)$")]
Images = dict[RoleName, str]


class RayTable(Section, frozen=True, kw_only=True):
    """[deploy.ray]: `slipstream run --on ray`. Roles: broker, learner, generator, reward-worker.

    See [clusters.md](clusters.md).
    """

    address: str = "auto"
    """The cluster: `auto` is the one that this host is a node of, or ADDRESS:PORT of its head."""
    require_token: bool = True
    """Refuse a cluster whose head answers without a token: start Ray with RAY_AUTH_MODE=token."""
    collectives: bool = False
    """Let weights go over NCCL or gloo between nodes, which know no authentication: for a network
    where every host is trusted. Else they go over tcp, encrypted and with keys."""
    start_timeout_s: Positive = 600.0
    """Wait this long for the cluster to have room, at the start and when a node is gone."""
    cpus: dict[str, NotNegative] = msgspec.field(default_factory=dict)
    """CPUs by role, such as { learner = 8 }; 1 where it is not named."""
    resources: dict[str, dict[str, Positive]] = msgspec.field(default_factory=dict)
    """Custom resources by role, such as { generator = { fast_disk = 1 } }."""
    labels: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """Labels by role that its node must have, such as { broker = { pool = "cpu" } }."""
    environment: tuple[str, ...] = ()
    """Variables of this process that roles are given, such as ["WANDB_API_KEY"]."""
    runtime_env: dict[str, Json] = msgspec.field(default_factory=dict)
    """Ray's runtime environment, such as { py_modules = ["/srv/slipstream"] }. With a working_dir,
    such as ".", Ray copies it to every node, and roles run in the copy; without, they run in the
    folder of the same name as this one, which every node must have."""


class SlurmTable(Section, frozen=True, kw_only=True):
    """[deploy.slurm]: the job that `slipstream render slurm` writes."""

    partition: str = ""
    """Partition of the job; empty is the cluster's default, as for the next two."""
    account: str = ""
    """Account that the job is charged to."""
    qos: str = ""
    """Quality of service of the job."""
    time_limit: SlurmTime = "24:00:00"
    """Time of one job, as sbatch takes it; the run goes on in the same job, queued again."""
    gpus_per_node: AtLeast0 = 8
    """GPUs of a node; of no effect where generators.device is cpu."""
    generators_per_node: AtLeast1 = 1
    """Generators on one node, where generators.device is cpu."""
    grace_s: AtLeast1 = 900
    """Seconds before the end of the job's time at which the learner is told to save."""
    port: Port = 0
    """First of five ports of the run on its first node; 0 chooses them by the job's number."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything else, such as "module load cuda"; empty puts the folder of the
    Python that rendered the script first in PATH."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as "--constraint=h100"."""


class KubernetesTable(Section, frozen=True, kw_only=True):
    """[deploy.kubernetes]: the objects that `slipstream render kubernetes` writes."""

    image: str = "slipstream:latest"
    """Image with Slipstream installed, for all roles that images does not name."""
    images: Images = msgspec.field(default_factory=dict)
    """Images by role, such as { learner = "slipstream:learner" }."""
    namespace: DnsName = "default"
    """Namespace of all objects."""
    storage_class: str = ""
    """Storage class of the broker's volume; empty is the cluster's default."""
    storage: str = "100Gi"
    """Size of the broker's volume: the ledger, Redis and the records."""
    shared_claim: DnsName = "slipstream-shared"
    """Existing claim with the model, the data and the learner's checkpoints, mounted at /shared;
    it must admit many writers (ReadWriteMany)."""
    overrides: Overrides = ("run.model=/shared/model", "data.file=/shared/train.jsonl")
    """Settings that differ in the cluster from the file's: the paths there."""
    gpus_per_node: AtLeast1 = 8
    """GPUs of a node, as many as a pod of the learner may have."""
    shared_memory: str = "16Gi"
    """Most memory that /dev/shm of learner and generators may take."""
    user: AtLeast1 = 1000
    """User and group that the roles run as."""
    max_generators: AtLeast0 = 0
    """Most generators that the autoscaler starts; 0 is generators.count, without an autoscaler."""
    ready_groups: AtLeast1 = 64
    """Groups ready for the learner at which the autoscaler has enough generators."""
    learner_grace_s: AtLeast1 = 900
    """Time that the learner has to save before Kubernetes kills it."""
    broker_grace_s: AtLeast1 = 120
    """The same for the broker, which closes its records."""
    generator_grace_s: AtLeast1 = 60
    """The same for a generator, which hands its work back."""
    reward_worker_grace_s: AtLeast1 = 60
    """The same for a reward worker, which scores what it holds."""


class ComposeTable(Section, frozen=True, kw_only=True):
    """[deploy.compose]: the file that `slipstream render compose` writes."""

    image: str = "slipstream:latest"
    """Image with Slipstream installed, for all roles that images does not name."""
    images: Images = msgspec.field(default_factory=dict)
    """Images by role, such as { learner = "slipstream:learner" }."""
    redis_image: str = "redis:7.4"
    """Image of the Redis server."""
    overrides: Overrides = ()
    """Settings that differ in the containers from the file's; folders keep their paths there."""
    mounts: tuple[str, ...] = ()
    """Further folders or files of the host that the roles read, at the same path."""
    shared_memory: str = "16gb"
    """Size of /dev/shm, which each role has of its own."""
    save_grace_s: AtLeast1 = 900
    """Time that the learner has to save before it is killed."""
    grace_s: Positive = 60
    """The same for the other roles, which hand their work back."""


class SkyPilotTable(Section, frozen=True, kw_only=True):
    """[deploy.skypilot]: the task that `slipstream render skypilot` writes."""

    cloud: str = ""
    """Where the nodes come from, such as "aws" or "kubernetes"; empty lets SkyPilot choose."""
    accelerators: str = "H100:8"
    """GPUs of a node, as SkyPilot names them; of no effect where generators.device is cpu."""
    nodes: AtLeast0 = 0
    """Nodes; 0 is as many as the GPUs of learner and generators need."""
    use_spot: bool = False
    """Take nodes that may be taken away; the run resumes on others (sky jobs launch)."""
    workdir: str = "."
    """Folder that is copied to every node; relative paths of the settings begin in it there."""
    setup: tuple[str, ...] = ("pip install '.[learner,generators,redis-server,sandbox]'",)
    """Lines of shell that install Slipstream on a node, from a checkout where it is the workdir."""
    storage: str = ""
    """Bucket with the run folder (s3://..., gs://...), mounted at /shared; needed to resume on
    other nodes. A file is in it once it was closed. Empty keeps the folder on the first node."""
    overrides: Overrides = ()
    """Settings that differ on the nodes from the file's: the paths there."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65_530)] = 5555
    """First of four ports of the run on its first node."""
