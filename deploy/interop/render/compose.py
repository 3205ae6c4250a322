"""Docker compose: each role is a service on one host, next to a private Redis server.

All services share one network without published ports, and a folder of Unix sockets, so no role
needs a key. The password of Redis is a file that `prepare.sh` makes.
"""

from pathlib import Path
from typing import NamedTuple

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import NodeLayout, layout_of
from slipstream.deploy.interop.render.settings_file import SETTINGS_FILE, settings_text
from slipstream.deploy.interop.render.template import FilledText, Value, assignments, fill
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table

COMPOSE_FILE, PREPARE = "compose.yaml", "prepare.sh"
_FIRST_HEALTH_PORT = 8081
_REDIS: list[Value] = [
    "broker.redis.url=redis://127.0.0.1:6379",
    "broker.redis.password_file=/run/secrets/redis_password",
]


class RoleService(NamedTuple):
    """A process of the run as a service."""

    role: str
    name: str
    grace_s: float  # time from SIGTERM to SIGKILL
    gpus: tuple[int, ...] = ()


def render_compose(
    config: RunConfig, there: Table, *, out: Path, folder: Path, user: str, gpus: int
) -> dict[str, str]:
    """Return the files of a run on one host.

    Args:
        config: Settings of the run.
        there: Settings in the containers.
        out: Folder of the files.
        folder: Base of relative paths in the settings.
        user: User of all processes, UID:GID; owns the secrets.
        gpus: GPUs of the host.

    Raises:
        ConfigError: The host has too few GPUs, or a path cannot be mounted.
    """
    settings = config.deploy.compose
    layout = _layout(config, gpus)
    runs = (folder / config.run.dir).resolve()
    limit = config.deploy.max_restarts
    common: dict[str, Value] = {
        "user": user,
        "folder": str(folder),
        "run_dir": f"run.dir={runs}",
        "restart": f"on-failure:{limit}" if limit else "no",
        "shared_memory": settings.shared_memory,
        "mounts": _mounts(config, out=out, folder=folder, runs=runs),
        "hidden": str(out) if out.is_relative_to(folder) else None,  # folder with the password
    }
    roles = [
        _service_text(service, str(port), settings.images.get(service.role, settings.image), common)
        for port, service in enumerate(_services(config, layout), _FIRST_HEALTH_PORT)
    ]
    text = fill(
        "compose.yaml",
        user=user,
        redis_image=settings.redis_image,
        redis_volume=f"{out / 'redis'}:/data",
        password_file=str(out / "redis_password"),
        grace=f"{settings.grace_s:g}s",
        roles=FilledText("".join(roles)),
    )
    return {
        COMPOSE_FILE: text.replace("$", "$$"),  # compose replaces no variable
        SETTINGS_FILE: settings_text(there),
        PREPARE: fill("compose-prepare.sh", variables=assignments(out=out, runs=runs)),
    }


def _layout(config: RunConfig, gpus: int) -> NodeLayout:
    count = max(1, config.generators.generators.count)
    layout = layout_of(config, gpus_per_node=gpus, generators_per_node=count, setting="GPUs here")
    if layout.num_nodes > 1:
        raise ConfigError(
            f"compose is for one host, with {gpus} GPUs (deploy.gpus_per_host), but the run needs "
            f"{layout.num_nodes} (learner.ranks_per_node, learner.ranks, generators.count)"
        )
    return layout


def _mounts(config: RunConfig, *, out: Path, folder: Path, runs: Path) -> list[str]:
    """Return the volumes of every role."""
    mounts = config.deploy.compose.mounts
    paths = [config.run.model, config.broker.data.file, config.broker.eval.file, *mounts]
    outside = [path for path in map(Path, filter(None, paths)) if path.is_absolute()]
    if odd := [str(path) for path in (folder, out, runs, *outside) if ":" in str(path)]:
        raise ConfigError(f"compose takes no path with a colon, got {odd[0]} (run.dir, --out, ...)")
    if out == folder:
        raise ConfigError(f"every role is shown {folder}: give a folder within it as --out")
    return [
        f"{folder}:{folder}:ro",
        *(f"{path}:{path}:ro" for path in dict.fromkeys(outside)),
        f"{out / SETTINGS_FILE}:/etc/slipstream/{SETTINGS_FILE}:ro",
        f"{runs}:{runs}",
        f"{out / 'sockets'}:/run/slipstream",
    ]


def _services(config: RunConfig, layout: NodeLayout) -> list[RoleService]:
    settings = config.deploy.compose
    generators = [
        RoleService("generator", f"generator-{i}", settings.grace_s, place.gpus)
        for i, place in enumerate(layout.generators)
    ]
    workers = [
        RoleService("reward-worker", f"reward-worker-{i}", settings.grace_s)
        for i in range(layout.reward_workers)
    ]
    return [
        RoleService("broker", "broker", settings.grace_s),
        RoleService("learner", "learner", settings.save_grace_s, layout.learner[0].gpus),
        *generators,
        *workers,
    ]


def _service_text(service: RoleService, port: str, image: str, common: dict[str, Value]) -> str:
    is_broker = service.role == "broker"
    arguments: dict[str, list[Value] | None] = {"broker": None, "learner": ["--resume", "auto"]}
    return fill(
        "compose-role.yaml",
        **common,
        role=service.role,
        name=service.name,
        image=image,
        arguments=arguments.get(service.role, ["--name", service.name]),
        health_port=port,
        grace=f"{service.grace_s:g}s",
        gpus=[str(gpu) for gpu in service.gpus] or None,
        needed="redis" if is_broker else "broker",
        redis=_REDIS if is_broker else None,
        secret="redis_password" if is_broker else None,
    )
