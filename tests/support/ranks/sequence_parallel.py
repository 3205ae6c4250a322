"""One rank of a learner that trains one microbatch of T tokens, for several T.

Usage: sequence_parallel MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Tensor parallelism comes with sequence parallelism. Writes WORK_FOLDER/RANK.json.
"""

from pathlib import Path

from slipstream.learner.batches.packing import pack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import random_outcomes, train_sequences, whole_plan
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of

# With a critic, whose head is no layer of Megatron's, and a reference beside the policy.
ALGO: dict[str, object] = {
    "preset": "vapo",
    "critic": {"warmup_steps": 0, "lr": 1e-2},
    "kl": {"coefficient": 0.1, "name": "full"},
    "entropy_bonus": 0.01,
}


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    learner = section_of(layout, lr=1e-2, adam_epsilon=1e-3, dtype="float32")
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.starting_policy import build_policy

    settings = settings_of(folder, learner, ALGO)
    algorithm = algorithm_of(settings)
    report = []
    everything = train_sequences()
    for count in range(len(everything), 0, -1):
        some = everything[:count]
        batch, plan, data = pack(some, device.device()), whole_plan(some), random_outcomes(some)
        policy = build_policy(settings, algorithm, topology)
        assert policy.reference is not None
        assert policy.critic is not None
        before = policy.proximal([batch])[0]
        figures = [
            train_step(policy, [[batch]], [plan], data, algorithm, PhaseClock())[0]
            for _ in range(2)  # a critic has a gradient into its layers once its head is not 0
        ]
        report.append(
            {
                "tokens": len(batch.token_ids),
                "logprobs": before.logprobs.tolist(),
                "reference": policy.reference.logprobs([batch])[0].tolist(),
                "trained": policy.proximal([batch])[0].logprobs.tolist(),
                "values": policy.critic.values([batch])[0].tolist(),
                "figures": figures,
            }
        )
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
