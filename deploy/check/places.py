"""Where the processes of a run on one host are to be."""

from collections.abc import Sequence

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.host_program import HostProgram, Post
from slipstream.deploy.launch.plan import RolePlan, kind_of

_LOOPBACK = "127.0.0.1"
_NODE = "localhost"
NODE_PROGRAM = "slipstream.deploy.check.node"


class LocalPlaces:
    """This host, with a program for the learner's part and one for the generators'."""

    is_cluster = False

    def __init__(self, config: RunConfig, plans: Sequence[RolePlan]) -> None:
        """Start both; on the main thread.

        Args:
            config: of the run.
            plans: of its processes.
        """
        self.config = config
        engines = [plan for plan in plans if kind_of(plan.name) == "generator"]
        self._programs: list[HostProgram] = []
        try:
            self._programs.append(HostProgram(NODE_PROGRAM))
            if engines:
                environment = engines[0].environment
                self._programs.append(HostProgram(NODE_PROGRAM, environment=environment))
        except BaseException:
            self.close()
            raise
        self.posts: Sequence[Post] = [self._post(plan.name) for plan in plans]

    def _post(self, name: str) -> Post:
        program = self._programs[-1 if kind_of(name) == "generator" else 0]
        return Post(name, _NODE, _LOOPBACK, program.ask)

    def close(self) -> None:
        """End the programs."""
        for program in self._programs:
            program.close()
