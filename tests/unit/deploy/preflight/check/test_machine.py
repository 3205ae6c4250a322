from slipstream.deploy.predict.memory.gpu import GIB
from slipstream.deploy.predict.memory.learner_rank import MemoryPart
from slipstream.deploy.preflight.check.machine import SeenGpu, judge_gpus, judge_memory, read_gpus

LISTING = """0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 81078, 570.124.06
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 12000, 570.124.06
2, GPU-cccc, NVIDIA GB10, [N/A], [N/A], 580.1
"""


def test_gpus_are_read_from_what_the_driver_prints():
    first, second = read_gpus(LISTING)
    assert first == SeenGpu(
        "0", "GPU-aaaa", "NVIDIA H100 80GB HBM3", 81559 << 20, 81078 << 20, "570.124.06"
    )
    assert second.free_bytes == 12000 << 20
    assert read_gpus("NVIDIA-SMI has failed because it couldn't communicate") == []


def test_too_few_gpus_fail_and_a_busy_one_is_a_warning():
    gpus = read_gpus(LISTING)
    enough = judge_gpus(gpus[:1], 2, 2, wanted=True, nccl="2.27.5")
    assert [fact.outcome for fact in enough] == ["ok"]
    assert "driver 570.124.06; NCCL 2.27.5" in enough[0].found
    few = judge_gpus(gpus, 2, 3, wanted=True, nccl="2.27.5")
    assert [(fact.outcome, fact.name) for fact in few] == [("fail", "GPUs"), ("warn", "GPU in use")]
    assert "GPU 1: 11.7 of 79.6 GiB free" in few[1].found


def test_a_run_on_the_cpu_needs_no_gpu():
    (fact,) = judge_gpus([], 0, 4, wanted=False, nccl="")
    assert fact.outcome == "ok"


def test_what_does_not_fit_into_free_memory_is_a_warning_and_into_none_a_failure():
    part = [MemoryPart("learner", 4.0 * GIB, "")]

    def outcome(total_gib: int, free_gib: int) -> str:
        return judge_memory("memory", part, total_gib * GIB, free_gib * GIB, "run.model").outcome

    assert [outcome(8, 5), outcome(8, 3), outcome(3, 3)] == ["ok", "warn", "fail"]
    found = judge_memory("memory", part, 3 * GIB, 2 * GIB, "run.model").line
    assert found == (
        "fail memory: about 4.00 GiB are needed (learner 4.00); 2.00 of 3.00 GiB are free "
        "(run.model)"
    )
