"""Pure: how the learner's ranks divide one model, its layers, its tokens and its experts.

Ranks are numbered as in Megatron-Core (order ``tp-cp-ep-dp-pp``): the tensor-parallel rank changes
fastest, then context, then data, and the pipeline stage slowest, so that stages may be on
different hosts while ranks that communicate most share one. Experts divide the ranks of one stage
anew: expert-tensor fastest, then expert, then the copies of each expert.
"""

from dataclasses import dataclass, fields
from math import prod

from slipstream.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One rank's place in every dimension."""

    tensor: int
    context: int
    replica: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Ranks along each dimension; the rest of the ranks are data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1  # parts of the layers on each pipeline rank, whose passes are interleaved

    def check(self, ranks: int) -> None:
        """Refuse sizes that do not divide the ranks.

        Raises:
            ConfigError: the sizes do not divide the ranks; the message names both numbers.
        """
        whole = {
            "tensor_parallel": self.tensor,
            "pipeline_parallel": self.pipeline,
            "context_parallel": self.context,
        }
        _refuse_remainder(ranks, whole)
        experts = {
            "expert_tensor_parallel": self.expert_tensor,
            "expert_parallel": self.expert,
            "pipeline_parallel": self.pipeline,
        }
        if self.expert > 1 or self.expert_tensor > 1:
            _refuse_remainder(ranks, experts)
        if self.chunks > 1 and self.pipeline == 1:
            raise ConfigError(
                f"learner.interleaved_chunks = {self.chunks} needs learner.pipeline_parallel > 1, "
                "got 1: there is nothing to interleave"
            )

    @property
    def per_replica(self) -> int:
        """Ranks that share one replica of the model and train the same trajectories."""
        return self.tensor * self.pipeline * self.context

    @property
    def couples_replicas(self) -> bool:
        """True if replicas wait for each other in every microbatch, and need equally many."""
        return self.pipeline > 1 or self.expert > 1 or self.expert_tensor > 1

    @property
    def microbatch_multiple(self) -> int:
        """Required divisor of the number of microbatches: interleaving works in rounds."""
        return self.pipeline if self.chunks > 1 else 1

    def others(self) -> dict[str, int]:
        """Return the sizes above 1 by field, without tensor parallelism."""
        every = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensor"}
        return {name: size for name, size in every.items() if size > 1}

    def replicas(self, ranks: int) -> int:
        """Return the number of data-parallel replicas."""
        return ranks // self.per_replica

    def copies(self, ranks: int) -> tuple[int, int]:
        """Return how many ranks hold a rank's dense weights, and how many hold its experts."""
        of_stage = ranks // self.pipeline
        return of_stage // self.tensor, of_stage // (self.expert * self.expert_tensor)

    def has_copies(self, ranks: int, *, has_experts: bool) -> bool:
        """Return True if several ranks hold the same weights.

        They are replicas and the ranks of context parallelism; experts have copies of their own.
        """
        dense, expert = self.copies(ranks)
        return dense > 1 or (has_experts and expert > 1)

    def place(self, rank: int, ranks: int) -> Coordinates:
        """Return a rank's place."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        stage, replica = divmod(rest, self.replicas(ranks))
        return Coordinates(tensor, context, replica, stage)

    def ranks_of_replica(self, replica: int, ranks: int) -> list[int]:
        """Return the ranks that share a replica, in order; the first fetches for all."""
        return [rank for rank in range(ranks) if self.place(rank, ranks).replica == replica]

    def layers_of_stages(
        self, num_layers: int, given: tuple[int, ...] = (), setting: str = "run.model"
    ) -> tuple[int, ...]:
        """Return the layers of each stage in order, chunk by chunk where they are interleaved.

        Without ``given``, layers are divided evenly; stages in the middle take one more each of a
        remainder, since the first stage also has the embedding and the last the output layer.
        ``setting`` names the model.

        Raises:
            ConfigError: ``given`` does not fit the stages or the layers, or a stage has no layer.
        """
        stages = self.pipeline * self.chunks
        if not given:
            if num_layers < stages:
                raise ConfigError(
                    f"learner.pipeline_parallel x learner.interleaved_chunks = {self.pipeline} x "
                    f"{self.chunks} = {stages} stages, and {setting} has {num_layers} layers: each "
                    "stage needs one"
                )
            least, more = divmod(num_layers, stages)
            by_distance = sorted(range(stages), key=lambda i: (abs(2 * i + 1 - stages), i))
            return tuple(least + (i in by_distance[:more]) for i in range(stages))
        if len(given) != stages:
            raise ConfigError(
                f"learner.layers_per_stage has {len(given)} numbers, expected {stages}: "
                "learner.pipeline_parallel x learner.interleaved_chunks"
            )
        if sum(given) != num_layers:
            raise ConfigError(
                f"learner.layers_per_stage adds up to {sum(given)} layers, {setting} has "
                f"{num_layers}"
            )
        return given


def _refuse_remainder(ranks: int, sizes: dict[str, int]) -> None:
    needed = prod(sizes.values())
    if ranks % needed == 0:
        return
    used = {name: size for name, size in sizes.items() if size > 1}
    names = " x ".join(f"learner.{name}" for name in used)
    numbers = " x ".join(map(str, used.values())) + (f" = {needed}" if len(used) > 1 else "")
    raise ConfigError(f"learner.ranks = {ranks} is not a multiple of {names} = {numbers}")


@dataclass(frozen=True, slots=True)
class HeadShares:
    """Division of heads over c ranks of context parallelism, u ways; r rings of ranks share them.

    Rank = ring * u + part.
    """

    parts: int  # u
    rings: int  # r

    @classmethod
    def of(cls, *, ranks: int, heads: int, groups: int) -> "HeadShares":
        """Return the division with the most different heads.

        A rank's queries need their keys: either each rank has whole groups of heads, or several
        ranks have a copy of one group's keys.

        Args:
            ranks: c.
            heads: query heads of one tensor-parallel rank.
            groups: key and value heads of the same rank.
        """
        fitting = [
            parts
            for parts in range(1, ranks + 1)
            if ranks % parts == heads % parts == 0 and (groups % parts == 0 or parts % groups == 0)
        ]
        return cls(fitting[-1], ranks // fitting[-1])
