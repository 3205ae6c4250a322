"""What is proposed: legal layouts that fit, and never more GPUs where there is more memory."""

from dataclasses import replace

import pytest

from slipstream.deploy.predict.memory.learner_rank import learner_stages, total_bytes
from slipstream.deploy.predict.size.proposals import gpu_counts, host_bytes, proposals
from slipstream.learner.config import learner_settings
from slipstream.learner.model.division import refuse_layout
from slipstream.wire.settings.load import to_table
from tests.support.planned import config_of, question_of, shape_of

QWEN = "Qwen3-30B-A3B"


def test_numbers_of_gpus_are_parts_of_a_host_then_whole_hosts():
    assert gpu_counts(40, 8) == [1, 2, 3, 4, 6, 8, 16, 24, 32]
    assert gpu_counts(8, 4) == [1, 2, 3, 4, 8]


@pytest.mark.parametrize(("gpus", "gib"), [(8, 80), (16, 80), (24, 48)])
def test_every_proposal_fits_and_is_accepted_by_the_learner(gpus: int, gib: float):
    question = question_of(QWEN, gib=gib)
    found = proposals(question, gpus)
    assert found
    for one in found:
        assert one.gpu_bytes <= question.cluster.available_bytes
        again = learner_settings(
            {**question.config.table, "learner": to_table(one.settings.learner)}
        )
        refuse_layout(question.hf, again.learner)
        stages = learner_stages(question.hf, again, on_gpu=True)
        assert max(map(total_bytes, stages)) == one.gpu_bytes
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)


def test_more_memory_never_needs_more_gpus_or_more_seconds():
    counts = gpu_counts(64, 8)

    def fewest(gib: float) -> int:
        question = question_of(QWEN, gib=gib)
        return next(count for count in counts if proposals(question, count))

    needed = [fewest(gib) for gib in (24, 48, 80, 140, 600)]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > needed[-1] == 1
    least = [proposals(question_of(QWEN, gib=gib), 32)[0].step_s for gib in (48, 80, 140)]
    assert least == sorted(least, reverse=True)


def test_what_costs_time_is_taken_only_where_nothing_else_fits():
    for one in proposals(question_of(QWEN, gib=600), 8):
        assert (one.settings.learner.recompute, one.host_bytes) == ("none", 0)
    assert all(one.host_bytes for one in proposals(question_of(QWEN, gib=80), 4))


def test_a_host_without_memory_holds_no_optimizer():
    question = question_of(QWEN, gib=80)
    assert proposals(question, 4)
    assert proposals(replace(question, host_bytes=100e9), 4) == []


def test_microbatches_too_long_for_one_rank_are_divided_over_several():
    learner = {"max_tokens_per_microbatch": 1_048_576}
    found = proposals(question_of(QWEN, gib=80, learner=learner), 16)
    assert found
    assert min(one.settings.learner.context_parallel for one in found) > 1


def test_a_hosts_memory_is_16_bytes_of_each_parameter_that_is_updated_there():
    whole = {"ranks": 8, "expert_parallel": 8}
    hf = shape_of(QWEN)
    settings = config_of(QWEN, learner={**whole, "optimizer_offload_fraction": 1.0}).learner
    assert host_bytes(hf, settings, 8) == pytest.approx(16 * hf.num_parameters, rel=1e-6)
    away = config_of(QWEN, learner={**whole, "offload": ["optimizer"]}).learner
    assert host_bytes(hf, away, 8) == pytest.approx(12 * hf.num_parameters, rel=1e-6)
    assert host_bytes(hf, config_of(QWEN, learner=whole).learner, 8) == 0
