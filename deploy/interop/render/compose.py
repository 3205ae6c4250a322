"""Docker compose: each role is a service on one host, next to a private Redis server.

All services share one network without published ports, and a folder of Unix sockets, so no role
needs a key. The password of Redis is a file that `prepare.sh` makes.
"""

import shlex
from importlib.resources import files
from pathlib import Path

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import layout_of
from slipstream.deploy.interop.render.settings_file import SETTINGS_FILE, settings_text
from slipstream.deploy.interop.render.yaml_text import Yaml, documents
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table

COMPOSE_FILE, PREPARE = "compose.yaml", "prepare.sh"
_SCRIPT = files("slipstream.deploy.interop.render") / "compose_prepare.sh"
_REDIS_PORT, _HEALTH = 6379, 8081
_SOCKETS, _PASSWORD = "/run/slipstream", "redis_password"
_HEAD = """\
Written by `slipstream render compose`. First run prepare.sh here, once. `docker compose stop` lets
the learner save; `docker compose up` resumes."""
_START_REDIS = f"""\
exec redis-server - --bind 127.0.0.1 --port {_REDIS_PORT} --dir /data --appendonly yes \\
    --appendfsync always --save '' <<END
requirepass $(cat /run/secrets/{_PASSWORD})
END
"""
_ASK_REDIS = (
    f'REDISCLI_AUTH="$(cat /run/secrets/{_PASSWORD})" redis-cli -p {_REDIS_PORT} ping | '
    "grep -q PONG"
)
Service = dict[str, Yaml]


def render_compose(
    config: RunConfig, there: Table, *, out: Path, folder: Path, user: str, gpus: int
) -> dict[str, str]:
    """Return the files of a run on one host.

    Args:
        config: the run.
        there: Settings in the containers.
        out: Folder of the files.
        folder: Base of relative paths in the settings.
        user: User of all processes, UID:GID; owns the secrets.
        gpus: GPUs of the host.

    Raises:
        ConfigError: there are not enough GPUs, or the learner is on several nodes.
    """
    settings = config.deploy.compose
    count = max(1, config.generators.generators.count)
    places = layout_of(config, gpus_per_node=gpus, generators_per_node=count, setting="GPUs here")
    if places.num_nodes > 1:
        raise ConfigError(
            f"compose is for one host, with {gpus} GPUs (deploy.gpus_per_host), but the run needs "
            f"{places.num_nodes} (learner.ranks_per_node, learner.ranks, generators.count)"
        )
    runs = (folder / config.run.dir).resolve()
    paths = [config.run.model, config.broker.data.file, config.broker.eval.file, *settings.mounts]
    outside = [path for path in map(Path, filter(None, paths)) if path.is_absolute()]
    mounts = [
        f"{folder}:{folder}:ro",
        *(f"{path}:{path}:ro" for path in dict.fromkeys(outside)),
        f"{out / SETTINGS_FILE}:/etc/slipstream/{SETTINGS_FILE}:ro",
        f"{runs}:{runs}",
        f"{out / 'sockets'}:{_SOCKETS}",
    ]
    if odd := [str(path) for path in (folder, out, runs, *outside) if ":" in str(path)]:
        raise ConfigError(f"compose takes no path with a colon, got {odd[0]} (run.dir, --out, ...)")
    if out == folder:
        raise ConfigError(f"every role is shown {folder}: give a folder within it as --out")
    hidden: Yaml = [str(out)] if out.is_relative_to(folder) else []  # folder with the password
    restarts = f"on-failure:{config.deploy.max_restarts}" if config.deploy.max_restarts else "no"
    numbers = iter(range(_HEALTH, 65_536))

    def role(command: list[str], *, after: str, grace_s: float, gpu: tuple[int, ...]) -> Service:
        port = str(next(numbers))
        probe = ["CMD", "python", "-m", "slipstream.wire.process.health", "--port", port, "ready"]
        words = [
            *(command[0], "--config", f"/etc/slipstream/{SETTINGS_FILE}", *command[1:]),
            *("--health", port, f"run.dir={runs}", f"run.socket_dir={_SOCKETS}"),
        ]
        stores = command[0] == "start-broker"
        if stores:
            words.append(f"broker.redis.url=redis://127.0.0.1:{_REDIS_PORT}")
            words.append(f"broker.redis.password_file=/run/secrets/{_PASSWORD}")
        devices: Service = {"driver": "nvidia", "capabilities": ["gpu"]}
        devices["device_ids"] = [str(number) for number in gpu]
        return {
            "image": settings.images.get(command[0].removeprefix("start-"), settings.image),
            "user": user,
            "command": words,
            "working_dir": str(folder),
            "environment": {"OMP_NUM_THREADS": "1", "HOME": "/tmp"},  # noqa: S108 of the container
            "network_mode": "service:redis",
            "depends_on": {after: {"condition": "service_healthy"}},
            "restart": restarts,
            "init": True,
            "stop_grace_period": f"{grace_s:g}s",
            "shm_size": settings.shared_memory,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            **({"secrets": [_PASSWORD]} if stores else {}),
            "volumes": [*mounts],
            **({"tmpfs": hidden} if hidden else {}),
            "healthcheck": {
                "test": [*probe],
                "interval": "10s",
                "timeout": "10s",
                "retries": 6,
                "start_period": "30m",
            },
            **({"deploy": {"resources": {"reservations": {"devices": [devices]}}}} if gpu else {}),
        }

    services: Service = {
        "redis": {
            "image": settings.redis_image,
            "user": user,
            "command": ["sh", "-c", _START_REDIS],
            "stop_grace_period": f"{settings.grace_s:g}s",
            "restart": "on-failure",
            "cap_drop": ["ALL"],
            "secrets": [_PASSWORD],
            "volumes": [f"{out / 'redis'}:/data"],
            "healthcheck": {
                "test": ["CMD-SHELL", _ASK_REDIS],
                "interval": "5s",
                "timeout": "5s",
                "retries": 12,
            },
        },
        "broker": role(["start-broker"], after="redis", grace_s=settings.grace_s, gpu=()),
        "learner": role(
            ["start-learner", "--resume", "auto"],
            after="broker",
            grace_s=settings.save_grace_s,
            gpu=places.learner[0].gpus,
        ),
    }
    for i, place in enumerate(places.generators):
        name = f"generator-{i}"
        services[name] = role(
            ["start-generator", "--name", name],
            after="broker",
            grace_s=settings.grace_s,
            gpu=place.gpus,
        )
    for i in range(places.reward_workers):
        name = f"reward-worker-{i}"
        services[name] = role(
            ["start-reward-worker", "--name", name],
            after="broker",
            grace_s=settings.grace_s,
            gpu=(),
        )
    whole: Yaml = {"services": services, "secrets": {_PASSWORD: {"file": str(out / _PASSWORD)}}}
    variables = {"out": str(out), "runs": str(runs)}
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return {
        COMPOSE_FILE: documents(_literal(whole), head=_HEAD),
        SETTINGS_FILE: settings_text(there),
        PREPARE: "\n".join(["#!/bin/bash", *lines, ""]) + _SCRIPT.read_text("utf-8"),
    }


def _literal(value: Yaml) -> Yaml:
    """Return a value in which compose replaces no variable."""
    match value:
        case str():
            return value.replace("$", "$$")
        case list():
            return [_literal(item) for item in value]
        case dict():
            return {key: _literal(item) for key, item in value.items()}
    return value
