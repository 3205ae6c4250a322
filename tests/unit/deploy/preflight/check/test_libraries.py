from slipstream.deploy.preflight.check.facts import Fact
from slipstream.deploy.preflight.check.libraries import (
    judge_flash_attn,
    judge_installed,
    judge_versions,
)

OURS = {"torch": "2.11.0+cu128", "megatron-core": "0.19.2", "nccl": "2.27.5"}
ENGINE = {"torch": "2.11.0+cpu", "sglang": "0.5.23", "nccl": "2.27.5"}


def test_a_host_needs_the_libraries_of_its_roles():
    assert judge_installed(ENGINE, {"generator"}).outcome == "ok"
    assert judge_installed({}, {"broker", "reward-worker"}).outcome == "ok"
    missing = judge_installed(ENGINE, {"generator", "learner"})
    assert missing.line == (
        "fail libraries: not installed: megatron-core (for the learner): "
        "pip install 'slipstream[learner]'"
    )


def judged(
    theirs: dict[str, str], kind: str, *, collective: bool = True, on_gpu: bool = False
) -> Fact:
    return judge_versions(OURS, theirs, kinds={kind}, collective=collective, on_gpu=on_gpu)


def test_builds_of_one_release_are_equal():
    assert judged(ENGINE, "generator", on_gpu=True).outcome == "ok"


def test_another_release_of_torch_breaks_a_collective_alone():
    other = ENGINE | {"torch": "2.9.1"}
    found = judged(other, "generator")
    assert (found.outcome, found.setting) == ("fail", "weightbus.transport")
    assert found.found == "torch is 2.9.1 here, 2.11.0 on the learner's"
    assert judged(other, "generator", collective=False).outcome == "warn"


def test_nccl_counts_on_gpus_and_megatron_between_nodes_of_a_learner():
    other = ENGINE | {"nccl": "2.20.0"}
    assert judged(other, "generator").outcome == "ok"
    assert "nccl is 2.20.0 here" in judged(other, "generator", on_gpu=True).found
    assert "megatron-core is missing here" in judged(ENGINE, "learner").found
    assert judged(OURS, "learner", on_gpu=True).outcome == "ok"


def test_flash_attn_is_wanted_on_a_gpu_and_replaced_where_it_is_not():
    assert judge_flash_attn("", on_gpu=True).outcome == "ok"
    assert judge_flash_attn("no module", on_gpu=False).outcome == "ok"
    assert judge_flash_attn("undefined symbol", on_gpu=True).outcome == "warn"
