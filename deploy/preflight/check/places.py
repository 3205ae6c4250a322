"""This host as the place of a run's processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.deploy.launch.cluster.host_program import HostProgram, Post
from slipstream.deploy.launch.plan import RolePlan

NODE_PROGRAM = "slipstream.deploy.preflight.check.node"
_LOOPBACK = "127.0.0.1"


@contextmanager
def local_posts(
    plans: Sequence[RolePlan],
    *,
    node: str = "localhost",
    address: str = _LOOPBACK,
    progress: Callable[[str], None],
) -> Iterator[list[Post]]:
    """Run the program that looks at this host, and sees all of its GPUs.

    Args:
        plans: Plans of the processes on this host; the main thread starts the program.
        node: Name of this host.
        address: Address that other hosts use.
        progress: Called with what the program is doing.
    """
    program = HostProgram(NODE_PROGRAM, progress=progress)
    try:
        yield [Post(plan.name, node, address, program.ask) for plan in plans]
    finally:
        program.close()
