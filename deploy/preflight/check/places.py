"""This host as the place of a run's processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from slipstream.deploy.launch.cluster.host_program import HostProgram, Post
from slipstream.deploy.launch.plan import RolePlan, kind_of

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
    """Run a program for the generators of this host, and one for its other processes.

    Args:
        plans: Plans of the processes on this host; the main thread starts the programs.
        node: Name of this host.
        address: Address that other hosts use.
        progress: Called with what the programs are doing.
    """
    programs: dict[bool, HostProgram] = {}  # whether it is the generators'
    kinds = [kind_of(plan.name) == "generator" for plan in plans]
    with ExitStack() as closing:
        for is_engine, plan in zip(kinds, plans, strict=True):
            if is_engine not in programs:
                # The one program of a host sees all of its GPUs.
                seen = plan.environment if is_engine and not all(kinds) else {}
                program = HostProgram(NODE_PROGRAM, environment=seen, progress=progress)
                closing.callback(program.close)
                programs[is_engine] = program
        yield [
            Post(plan.name, node, address, programs[is_engine].ask)
            for is_engine, plan in zip(kinds, plans, strict=True)
        ]
