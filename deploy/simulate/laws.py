"""Pure: how long engines, the learner and publishes take, as few numbers that hardware explains.

An engine's is a roofline (Williams et al. 2009): a decode step reads every weight that it needs
once and the keys and values of every token before, and multiplies each sequence's newest token
with the weights; reading and multiplying overlap, what remains of a step is the same for all.

    step(n, C) = base + max(read(n), n m) + C k      seconds; n sequences, C tokens in the cache

    read(n)    bytes of the weights that n tokens meet, over the bandwidth
    m          2 N_active / FLOP/s          k      bytes of one token's keys and values / bandwidth
"""

from dataclasses import dataclass, replace
from typing import Self

from slipstream.deploy.launch.memory import GIB, kv_bytes_per_token
from slipstream.deploy.sizing.gpus import Gpu
from slipstream.learner.model.flops import SequenceCost, num_multiplied_parameters
from slipstream.learner.model.hf_config import HfConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaw:
    """Seconds of what one engine does."""

    base_s: float = 0.0  # of a decode step, however many sequences
    weights_s: float = 0.0  # to read the weights that every token meets
    experts_s: float = 0.0  # to read all experts
    expert_share: float = 1.0  # of the experts that one token meets
    sequence_s: float = 0.0  # to multiply one token with the weights
    context_s: float = 0.0  # to read one token's keys and values
    prefill_s: float = 0.0  # to compute one token of a prompt
    max_cached_tokens: float = float("inf")

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number >= 0")
        if not 0 < self.expert_share <= 1:
            raise ValueError(f"expert_share is {self.expert_share}, expected within (0, 1]")
        if self.step_s(1, 0.0) + self.context_s <= 0:
            raise ValueError("an engine whose steps take no time")

    @classmethod
    def of(
        cls,
        hf: HfConfig,
        gpu: Gpu,
        *,
        num_gpus: int,
        base_s: float,
        bandwidth_share: float,
        flops_share: float,
        memory_share: float = 0.85,
        weight_bytes: float = 2.0,
    ) -> Self:
        """Return the law of an engine on some GPUs, of tensor parallelism.

        Args:
            hf: the policy's architecture.
            gpu: their kind.
            num_gpus: of one engine.
            base_s: seconds of a step beside reading and multiplying.
            bandwidth_share: of the memory's bandwidth that is reached.
            flops_share: of the peak that is reached.
            memory_share: of the memory that weights and cache have.
            weight_bytes: of one parameter.
        """
        bandwidth = gpu.hbm_bytes_s * bandwidth_share * num_gpus
        flops = gpu.peak_flops * flops_share * num_gpus
        active = num_multiplied_parameters(hf)
        routed = hf.num_routed_experts
        experts = _expert_parameters(hf)
        kv_bytes = kv_bytes_per_token(hf)
        cache = memory_share * gpu.memory_gib * GIB * num_gpus - weight_bytes * hf.num_parameters
        if cache <= 0:
            raise ValueError(
                f"{num_gpus} GPUs of {gpu.memory_gib:g} GiB do not hold "
                f"{weight_bytes * hf.num_parameters / 1e9:.0f} GB of weights"
            )
        return cls(
            base_s=base_s,
            weights_s=weight_bytes * (hf.num_parameters - experts) / bandwidth,
            experts_s=weight_bytes * experts / bandwidth,
            expert_share=hf.experts_per_token / routed if routed else 1.0,
            sequence_s=2 * active / flops,
            context_s=kv_bytes / bandwidth,
            prefill_s=2 * active / flops,
            max_cached_tokens=cache / kv_bytes,
        )

    def step_s(self, num_sequences: int, context: float) -> float:
        """Return the seconds of one decode step.

        Args:
            num_sequences: that get a token.
            context: tokens of all of them before it.
        """
        return self.flat_s(num_sequences) + self.context_s * context

    def flat_s(self, num_sequences: int) -> float:
        """Return the part of a step that does not depend on what is in the cache."""
        read = self.weights_s
        if self.experts_s:
            read += self.experts_s * (1.0 - (1.0 - self.expert_share) ** num_sequences)
        return self.base_s + max(read, num_sequences * self.sequence_s)

    def slower(self, factor: float) -> Self:
        """Return the law of an engine that takes ``factor`` times as long for everything."""
        names = ("base_s", "weights_s", "experts_s", "sequence_s", "context_s", "prefill_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


def _expert_parameters(hf: HfConfig) -> int:
    """Return the parameters of all routed experts, of which a token meets a few."""
    if not hf.num_routed_experts:
        return 0
    one = 3 * hf.hidden_size * hf.expert_inner
    return hf.num_sparse_layers * hf.num_routed_experts * one


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLaw:
    """Seconds of a learner step: ``step_s + token_s * tokens + pair_s * squared lengths``."""

    step_s: float = 0.0  # optimizer, planning, the copy of the weights for a publish
    token_s: float = 0.0
    pair_s: float = 0.0  # of a squared length

    @classmethod
    def of(
        cls,
        hf: HfConfig,
        gpu: Gpu,
        *,
        num_gpus: int,
        mfu: float,
        step_s: float,
        passes: float = 1.0,
    ) -> Self:
        """Return the law of a learner on some GPUs.

        Args:
            hf: the policy's architecture.
            gpu: their kind.
            num_gpus: of the learner.
            mfu: share of the peak that counted operations reach.
            step_s: seconds of a step whatever its tokens.
            passes: passes over a batch in units of one forward and its backward pass: a forward
                pass alone (proximal logprobs, a reference) is a third more.
        """
        cost = SequenceCost.of(hf)
        flops = gpu.peak_flops * mfu * num_gpus
        return cls(
            step_s=step_s,
            token_s=passes * cost.linear / flops,
            pair_s=passes * cost.quadratic / flops,
        )

    def seconds(self, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: of all sequences, prompts included.
            num_pairs: sum of their squared lengths.
        """
        return self.step_s + self.token_s * num_tokens + self.pair_s * num_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishLaw:
    """Seconds of a publish."""

    stall_s: float = 0.0  # for which the learner stands still: its copy of the weights
    transfer_s: float = 0.0  # until engines have them; they generate meanwhile
    pause_s: float = 0.0  # for which an engine stands still
    recomputes: bool = True  # keys and values under way, under the new weights
    drains: bool = False  # an engine finishes what it has before it takes them

    @classmethod
    def of(
        cls,
        num_bytes: float,
        *,
        from_learner: float,
        link: float,
        to_engine: float,
        overhead_s: float = 0.0,
    ) -> Self:
        """Return the law of a publish that is staged on the engines' hosts.

        Args:
            num_bytes: of a version.
            from_learner: bytes per second from the learner's GPUs to their hosts, all together.
            link: bytes per second into one engine's host.
            to_engine: bytes per second from a host's memory into an engine's GPUs, all together.
            overhead_s: of the orders of a publish.
        """
        return cls(
            stall_s=num_bytes / from_learner,
            transfer_s=num_bytes / link + overhead_s,
            pause_s=num_bytes / to_engine,
        )
