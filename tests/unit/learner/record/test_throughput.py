"""Figures of how fast a step was, by hand."""

import pytest

from slipstream.learner.record.throughput import StepWork, throughput_figures

WORK = StepWork(num_tokens=6000, num_trained_tokens=4000, flops=8e15)
PHASES = {"wait": 4.0, "fetch": 1.0, "proximal": 2.0, "train": 10.0, "export": 2.0, "commit": 1.0}


def test_tokens_are_divided_by_the_whole_step_and_flops_by_the_training_of_all_ranks():
    assert throughput_figures(WORK, PHASES, ranks=4, peak_tflops=1000.0) == pytest.approx(
        {
            "throughput/tokens_per_s": 300.0,  # 6000 in 20 s
            "throughput/trained_tokens_per_s": 200.0,
            "throughput/tflops_per_rank": 200.0,  # 8000 TFLOP in 10 s on 4
            "throughput/mfu": 0.2,
            "throughput/stall_data": 0.25,  # 4 + 1 of 20
            "throughput/stall_publish": 0.1,
        }
    )


def test_without_a_peak_there_is_no_share_of_it():
    figures = throughput_figures(WORK, PHASES, ranks=4, peak_tflops=None)
    assert "throughput/mfu" not in figures
    assert figures["throughput/tflops_per_rank"] == pytest.approx(200.0)


def test_a_step_that_trained_the_critic_alone_has_no_flops_of_the_policy():
    work = StepWork(num_tokens=600, num_trained_tokens=400, flops=0.0)
    phases = {"wait": 1.0, "critic": 3.0}
    assert throughput_figures(work, phases, ranks=1, peak_tflops=1.0) == pytest.approx(
        {
            "throughput/tokens_per_s": 150.0,
            "throughput/trained_tokens_per_s": 100.0,
            "throughput/stall_data": 0.25,
            "throughput/stall_publish": 0.0,
        }
    )


def test_no_time_is_no_figure():
    assert throughput_figures(WORK, {}, ranks=1, peak_tflops=1.0) == {}
