"""Parallel sizes: what divides, where each rank is, and which layers each stage has."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.parallel import Coordinates, ParallelSizes
from slipstream.wire.errors import ConfigError

SIZES = st.builds(
    ParallelSizes,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 4),
    context=st.sampled_from([1, 2, 3]),
)


def test_ranks_are_numbered_as_megatron_numbers_them():
    sizes = ParallelSizes(tensor=2, pipeline=2)
    assert sizes.replicas(8) == 2
    places = [sizes.place(rank, 8) for rank in range(8)]
    assert places[:4] == [
        Coordinates(tensor=tensor, context=0, replica=replica, stage=0)
        for replica in range(2)
        for tensor in range(2)
    ]
    assert [place.stage for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sizes.ranks_of_replica(1, 8) == [2, 3, 6, 7]


@given(SIZES, st.integers(1, 3))
def test_replicas_divide_the_ranks_and_no_two_ranks_have_one_place(
    sizes: ParallelSizes, replicas: int
):
    ranks = replicas * sizes.per_replica
    sizes.check(ranks)
    assert sizes.replicas(ranks) == replicas
    assert len({sizes.place(rank, ranks) for rank in range(ranks)}) == ranks
    every = [sizes.ranks_of_replica(replica, ranks) for replica in range(replicas)]
    assert sorted(rank for members in every for rank in members) == list(range(ranks))
    for replica, (leader, *_) in enumerate(every):
        assert sizes.place(leader, ranks) == Coordinates(0, 0, replica, 0)


def test_sizes_that_do_not_fit_are_refused_with_both_numbers():
    for sizes, ranks, why in [
        (
            ParallelSizes(tensor=2),
            3,
            "learner.ranks = 3 is not a multiple of learner.tensor_parallel = 2",
        ),
        (
            ParallelSizes(tensor=2, pipeline=3),
            8,
            "learner.ranks = 8 is not a multiple of learner.tensor_parallel x "
            "learner.pipeline_parallel = 2 x 3 = 6",
        ),
        (
            ParallelSizes(expert=3),
            4,
            "learner.ranks = 4 is not a multiple of learner.expert_parallel = 3",
        ),
        (
            ParallelSizes(pipeline=2, expert=2, expert_tensor=2),
            4,
            "learner.ranks = 4 is not a multiple of learner.expert_tensor_parallel x "
            "learner.expert_parallel x learner.pipeline_parallel = 2 x 2 x 2 = 8",
        ),
        (
            ParallelSizes(chunks=2),
            4,
            "learner.interleaved_chunks = 2 needs learner.pipeline_parallel > 1, got 1: there is "
            "nothing to interleave",
        ),
    ]:
        with pytest.raises(ConfigError) as refusal:
            sizes.check(ranks)
        assert str(refusal.value) == why


@given(SIZES, st.integers(1, 3), st.integers(0, 40))
def test_layers_are_divided_evenly_and_the_ends_have_no_more_than_the_middle(
    sizes: ParallelSizes, chunks: int, more: int
):
    sizes = replace(sizes, chunks=chunks)
    stages = sizes.pipeline * chunks
    layers = sizes.layers_of_stages(stages + more)
    assert (len(layers), sum(layers)) == (stages, stages + more)
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers)
    if stages > 2:
        assert layers[0] <= layers[stages // 2]


def test_layers_per_stage_are_taken_as_given():
    assert ParallelSizes(pipeline=3).layers_of_stages(9, (2, 3, 4)) == (2, 3, 4)


def test_numbers_of_layers_for_other_stages_are_refused():
    with pytest.raises(ConfigError) as refusal:
        ParallelSizes(pipeline=2).layers_of_stages(5, (1, 3, 1))
    assert str(refusal.value) == (
        "learner.layers_per_stage has 3 numbers, expected 2: learner.pipeline_parallel x "
        "learner.interleaved_chunks"
    )


def test_what_replicas_share_decides_whether_they_need_as_many_microbatches():
    assert not ParallelSizes(tensor=4, context=2).couples_replicas
    assert ParallelSizes(pipeline=2).couples_replicas
    assert ParallelSizes(expert=2).couples_replicas
    assert ParallelSizes(pipeline=4, chunks=2).microbatch_multiple == 4
    assert ParallelSizes(pipeline=4).microbatch_multiple == 1
