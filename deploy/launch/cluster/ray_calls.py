"""Calls of Ray: a cluster, groups of places on it, role hosts there, and their answers.

The only module that imports ray. Errors of Ray are raised as those of this module.
"""

import logging
import os
import re
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.deploy.launch.cluster.pools import Pool
from slipstream.deploy.launch.cluster.ray_token import require_token
from slipstream.deploy.launch.cluster.role_host import RoleHost, take_niceness
from slipstream.deploy.targets import RayTable
from slipstream.wire.errors import ConfigError, SlipstreamError

Actor: TypeAlias = Any  # role host; Ray makes its methods at run time
CallResult: TypeAlias = Any  # future result of a method of a role host
Group: TypeAlias = PlacementGroup  # places of a pool

disconnect = ray.shutdown

_log = logging.getLogger(__name__)
_RESULT_S = 60.0  # limit for a host; only the cluster decides whether the host is lost


class HostCallError(SlipstreamError):
    """Ray did not carry out a call; ``text`` is its error with all tracebacks."""

    def __init__(self, error: RayError) -> None:
        super().__init__(reason_of(error))
        self.text = _plain(error)


class HostLostError(HostCallError):
    """The node is gone, or the role host has ended; the method may have run."""


class HostUnreachableError(HostLostError):
    """The node cannot be reached; the cluster may give it up, or reach it again."""


class _RayRoleHost(RoleHost):
    """A role host that knows its node, and has the niceness of Ray in place of a worker's 15."""

    def __init__(self) -> None:
        take_niceness(os.getppid())
        super().__init__()
        self.node = str(ray.get_runtime_context().get_node_id())


def connect(settings: RayTable, run_name: str) -> bool:
    """Make this process a driver of the cluster; return whether the cluster has GPUs.

    Raises:
        ConfigError: the cluster cannot be reached, or its head asks for no token.
    """
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    try:
        ray.init(
            address=settings.address,
            namespace=f"slipstream-{run_name}",
            runtime_env=settings.runtime_env or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {settings.address} (deploy.ray.address): {reason_of(error)}"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)
    if settings.require_token:
        try:
            require_token(str(ray.get_runtime_context().gcs_address), settings.start_timeout_s)
        except BaseException:
            ray.shutdown()
            raise
    return "GPU" in ray.cluster_resources()


def free_resources() -> str:
    """Return the free resources of the cluster, as text."""
    kinds = {
        name: count
        for name, count in ray.available_resources().items()
        if not name.startswith(("node:", "bundle_group", "memory", "object_store"))
        and "_group_" not in name
    }
    return ", ".join(f"{name} {count:g}" for name, count in sorted(kinds.items())) or "nothing"


def address_of(node: str) -> str:
    """Return the address of a node, which may be gone."""
    return next(str(row["NodeManagerAddress"]) for row in ray.nodes() if row["NodeID"] == node)


def is_alive(node: str) -> bool:
    """Return whether a node is in the cluster."""
    return any(row["NodeID"] == node and row["Alive"] for row in ray.nodes())


def new_group(pool: Pool, name: str) -> Group:
    """Ask the cluster for the places of a pool."""
    group: Group = placement_group(
        [dict(bundle) for bundle in pool.bundles],
        strategy=pool.strategy,
        name=name,
        bundle_label_selector=[dict(labels) for labels in pool.labels],
    )
    return group


def new_host(pool: Pool, group: Group, process: str, name: str) -> Actor:
    """Start the role host of a process in its place of the pool; return at once."""
    index = pool.members.index(process)
    bundle = dict(pool.bundles[index])
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    make: Any = ray.remote(
        num_cpus=bundle.pop("CPU", 0),
        num_gpus=bundle.pop("GPU", 0),
        resources=bundle,
        max_restarts=0,
        max_concurrency=8,
        name=name,
        scheduling_strategy=place,
    )
    return make(_RayRoleHost).remote()


def end_hosts(actors: Iterable[Actor], groups: Iterable[Group] = ()) -> None:
    """Let role hosts end what is theirs, kill them, and give their places back."""
    actors = list(actors)
    with suppress(RayError):
        if closing := [actor.close.remote() for actor in actors]:
            ray.wait(closing, num_returns=len(closing), timeout=_RESULT_S)
    for actor in actors:
        kill(actor)
    for group in groups:
        with suppress(RayError):
            remove_placement_group(group)


def kill(actor: Actor) -> None:
    """End a role host at once; the kernel ends its role."""
    with suppress(RayError):
        ray.kill(actor)


def _log_silence() -> None:
    _log.warning("a node of the cluster has not answered for %g s", _RESULT_S)


def result_of(
    call: CallResult, *, every_s: float = _RESULT_S, on_silence: Callable[[], None] = _log_silence
) -> Any:  # noqa: ANN401 whatever the method returns
    """Return the result of a role host's method; wait as long as the cluster has its node.

    Args:
        call: The method's future result.
        every_s: Time between two calls of ``on_silence``.
        on_silence: Called while there is no result; its errors end the wait.

    Raises:
        HostLostError: the node is gone or cannot be reached; the method may have run.
        HostCallError: Ray failed, or the method raised a foreign error.
        SlipstreamError: raised by the method.
    """
    while True:
        try:
            return ray.get(call, timeout=every_s)
        except GetTimeoutError:
            on_silence()
        except RayError as error:
            raise translated(error) from error


def translated(error: RayError) -> SlipstreamError:
    """Return the error of this module for one of Ray's; an error of ours as it was raised."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, SlipstreamError):
        return error.cause
    if isinstance(error, ActorUnavailableError):
        return HostUnreachableError(error)
    return HostLostError(error) if isinstance(error, RayActorError) else HostCallError(error)


def reason_of(error: BaseException) -> str:
    """Return an error in one line; the last line of Ray's own, which begin with tracebacks."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, BaseException) and not isinstance(cause, RayError):
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    lines = [line.strip() for line in _plain(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    return lines[-1 if isinstance(error, RayError) else 0]


def _plain(error: BaseException) -> str:
    """Return the text of an error without Ray's colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
