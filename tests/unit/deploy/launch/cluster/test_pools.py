"""Which processes a cluster places together, and what each needs from its node."""

from pathlib import Path

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.launch.cluster.pools import pool_of, pools_of
from tests.support.blank_model import write_blank_model


def config_of(folder: Path, **learner: object) -> RunConfig:
    write_blank_model(folder / "model", hidden=16, layers=1)
    cluster = {"cpus": {"learner": 8}, "labels": {"broker": {"node": "head"}}}
    return run_config(
        {
            "run": {"name": "r", "dir": str(folder), "model": str(folder / "model")},
            "data": {"file": "train.jsonl"},
            "generators": {"device": "cuda", "count": 2},
            "learner": learner,
            "deploy": {"ray": cluster | {"resources": {"generator": {"fast_disk": 1}}}},
        }
    )


def test_services_are_packed_and_generators_spread(tmp_path: Path):
    services, learner, generators = pools_of(config_of(tmp_path), uses_gpus=True)
    assert (services.strategy, services.members) == ("PACK", ("broker", "reward-worker-0"))
    assert services.labels == ({"node": "head"}, {})
    assert (learner.strategy, learner.bundles) == ("PACK", ({"CPU": 8, "GPU": 1},))
    assert (generators.strategy, len(generators.members)) == ("SPREAD", 2)
    assert generators.needs == "the generators need 2 x (CPU 1 + GPU 1 + fast_disk 1)"


def test_a_learner_on_several_nodes_has_each_for_itself(tmp_path: Path):
    config = config_of(tmp_path, ranks=4, ranks_per_node=2)
    learner = pools_of(config, uses_gpus=True)[1]
    assert (learner.strategy, learner.members) == ("STRICT_SPREAD", ("learner", "learner-1"))
    assert [bundle["GPU"] for bundle in learner.bundles] == [2, 2]


def test_an_additional_generator_is_a_pool_of_its_own_without_gpus_on_cpus(tmp_path: Path):
    config = config_of(tmp_path).with_settings("generators", count=0)
    assert [pool.name for pool in pools_of(config, uses_gpus=False)] == ["services", "learner"]
    pool = pool_of(config, "generator-3", ["generator-3"], uses_gpus=False)
    assert pool.needs == "the generator-3 needs 1 x (CPU 1 + fast_disk 1)"
