"""This host as the place of a run's processes."""

from collections.abc import Callable, Sequence

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.host_program import HostProgram, Post
from slipstream.deploy.launch.plan import RolePlan

NODE_PROGRAM = "slipstream.deploy.preflight.check.node"
_LOOPBACK = "127.0.0.1"


class LocalPlaces:
    """This host, and the program that looks at it, which sees all of its GPUs."""

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
        """Start the program; on the main thread.

        Args:
            config: The run.
            plans: Plans of its processes on this host.
            node: Name of this host.
            address: Address that other hosts use.
            progress: Called with what the program is doing.
        """
        self.config = config
        self._program = HostProgram(NODE_PROGRAM, progress=progress)
        self.posts: Sequence[Post] = [
            Post(plan.name, node, address, self._program.ask) for plan in plans
        ]

    def close(self) -> None:
        """End the program."""
        self._program.close()
