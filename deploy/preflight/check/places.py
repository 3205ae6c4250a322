"""This host as the place of a run's processes."""

from collections.abc import Callable, Sequence

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.cluster.host_program import HostProgram, Post
from slipstream.deploy.launch.plan import RolePlan, kind_of

NODE_PROGRAM = "slipstream.deploy.preflight.check.node"
_LOOPBACK = "127.0.0.1"


class LocalPlaces:
    """This host: a program for its generators, and one for its other processes."""

    is_cluster = False

    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[RolePlan],
        *,
        node: str = "localhost",
        address: str = _LOOPBACK,
        progress: Callable[[str], None],
    ) -> None:
        """Start them; on the main thread.

        Args:
            config: of the run.
            plans: of its processes on this host.
            node: name of this host.
            address: at which others reach it.
            progress: called with what the programs are about.
        """
        self.config = config
        self._programs: dict[bool, HostProgram] = {}  # whether it is the generators'
        kinds = [kind_of(plan.name) == "generator" for plan in plans]
        try:
            for is_engine, plan in zip(kinds, plans, strict=True):
                if is_engine not in self._programs:
                    # The one program of a host sees all of its GPUs.
                    seen = plan.environment if is_engine and not all(kinds) else {}
                    self._programs[is_engine] = HostProgram(
                        NODE_PROGRAM, environment=seen, progress=progress
                    )
        except BaseException:
            self.close()
            raise
        self.posts: Sequence[Post] = [
            Post(plan.name, node, address, self._programs[is_engine].ask)
            for is_engine, plan in zip(kinds, plans, strict=True)
        ]

    def close(self) -> None:
        """End the programs."""
        for program in self._programs.values():
            program.close()
