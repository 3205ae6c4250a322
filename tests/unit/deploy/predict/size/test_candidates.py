"""Which layouts are looked at, and that the learner has the last word."""

from slipstream.deploy.predict.size.candidates import Division, accepted, divisions, savings
from tests.support.planned import config_of, shape_of

QWEN = "Qwen3-30B-A3B"


def test_divisions_keep_tensor_parallelism_on_a_host_and_divide_the_ranks():
    found = list(divisions(shape_of(QWEN), 16, 8, context=2))
    assert {one.tensor_parallel for one in found} == {1, 2, 4, 8}
    for one in found:
        assert 16 % (one.tensor_parallel * one.pipeline_parallel * 2) == 0
        assert (16 // one.pipeline_parallel) % one.expert_parallel == 0
        assert one.ranks_per_node == 8


def test_parts_of_hosts_are_not_divided():
    assert list(divisions(shape_of(QWEN), 12, 8, context=1)) == []


def _division(**sizes: int) -> Division:
    kinds = ("tensor", "pipeline", "context", "expert")
    parallel = {f"{kind}_parallel": sizes.get(kind, 1) for kind in kinds}
    return Division(ranks=8, ranks_per_node=0, **parallel)


def test_what_the_learner_refuses_is_no_candidate():
    config, hf = config_of(QWEN), shape_of(QWEN)
    whole = {"recompute": "full"}
    assert accepted(config.table, hf, _division(tensor=4, expert=2), whole) is not None
    # 4 heads of keys and values cannot be split over 8 ranks.
    assert accepted(config.table, hf, _division(tensor=8), whole) is None
    # A step of two trajectories has none for six of eight replicas.
    small = config_of(QWEN, run={"groups_per_step": 1, "group_size": 2})
    assert accepted(small.table, hf, _division(), whole) is None


def test_what_the_file_says_of_other_layouts_does_not_count():
    given = {
        "ranks": 4,
        "tensor_parallel": 4,
        "recompute": "full",
        "recompute_layers": 2,
        "lr": 3e-6,
    }
    config = config_of(QWEN, learner=given)
    settings = accepted(config.table, shape_of(QWEN), _division(), {"recompute": "none"})
    assert settings is not None
    learner = settings.learner
    assert (learner.tensor_parallel, learner.recompute_layers, learner.lr) == (1, 0, 3e-6)


def test_savings_begin_with_what_costs_nothing_and_end_on_the_host():
    hf = shape_of(QWEN)
    found = savings(hf, config_of(QWEN).learner)
    assert found[0] == {"recompute": "none", "optimizer_offload_fraction": 0.0}
    assert found[1]["recompute_modules"] == ["moe"]
    assert found[-1]["optimizer_offload_fraction"] == 1.0
    # With moments in bfloat16 the learner refuses a host's optimizer: they are float32 there.
    assert found[-1]["moments_dtype"] == "float32"


def test_adapters_leave_their_optimizer_on_the_gpu():
    config = config_of("Qwen3-30B-A3B", lora={"rank": 8})
    assert {
        one["optimizer_offload_fraction"] for one in savings(shape_of(QWEN), config.learner)
    } == {0.0}
