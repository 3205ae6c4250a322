from pathlib import Path

import pytest

from slipstream.learner.config import learner_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table
from tests.support.blank_model import write_blank_model


@pytest.fixture
def run(tmp_path: Path) -> Table:
    (tmp_path / "config.json").write_text("{}")
    return {"model": str(tmp_path), "steps": 20}


def refused(run: Table, message: str, **sections: Table) -> None:
    with pytest.raises(ConfigError, match=message):
        learner_settings({"run": run, **sections})


def test_decay_ends_with_the_run_by_default(run: Table):
    assert learner_settings({"run": run}).lr_decay_steps == 20
    learner = {"lr_schedule": "cosine", "lr_decay_steps": 50}
    assert learner_settings({"run": run, "learner": learner}).lr_decay_steps == 50


def test_whether_the_reference_is_the_policy_is_told_without_its_weights(tmp_path: Path):
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    url, cache = f"file://{tmp_path}/model", tmp_path / "cache"
    run = {"model": url, "cache_dir": str(cache)}
    settings = learner_settings({"run": run, "lora": {"rank": 2}})
    (config,) = (path for path in cache.iterdir() if path.is_dir())
    assert [settings.base_is(name) for name in ("", url, str(config))] == [True] * 3
    assert not settings.base_is(str(tmp_path / "model"))
    assert [path for path in cache.iterdir() if path.is_dir()] == [config]


def test_settings_of_the_optimizer_that_cannot_be_are_refused(run: Table):
    for learner, message in [
        ({"lr": 1e-5, "lr_min": 1e-4}, r"learner\.lr_min = 0\.0001 is above learner\.lr = 1e-05"),
        ({"lr_min": 1e-7}, r"learner\.lr_min has no meaning with .*\"constant\""),
        ({"lr_decay_steps": 5}, r"learner\.lr_decay_steps has no meaning with .*\"constant\""),
        (
            {"lr_schedule": "linear", "lr_warmup_steps": 20},
            r"lr_warmup_steps = 20 must be below run\.steps = 20",
        ),
        (
            {"lr_schedule": "linear", "lr_warmup_steps": 9, "lr_decay_steps": 8},
            r"must be below learner\.lr_decay_steps = 8",
        ),
        ({"lr_schedule": "WSD"}, r"needs learner\.wsd_decay_steps from 1 to 20 .* got 0"),
        (
            {"lr_schedule": "WSD", "lr_warmup_steps": 10, "wsd_decay_steps": 11},
            r"from 1 to 10 \(run\.steps - learner\.lr_warmup_steps\), got 11",
        ),
        (
            {"lr_schedule": "cosine", "wsd_decay_steps": 3},
            r"wsd_decay_steps has no meaning with learner\.lr_schedule = \"cosine\"",
        ),
        ({"lr_schedule": "wsd"}, 'lr_schedule must be one of .*got "wsd": did you mean "WSD"'),
        (
            {"moments_dtype": "bfloat16", "adam_beta2": 0.999},
            r"moments_dtype = \"bfloat16\" needs learner\.adam_beta2 <= 0\.99, got 0\.999",
        ),
        (
            {"optimizer_offload_fraction": 1.0, "dtype": "float32"},
            r"= 1 needs weights in bfloat16, got learner\.dtype = \"float32\"",
        ),
        (
            {"optimizer_offload_fraction": 0.5, "offload": ["optimizer"]},
            r"learner\.offload has \"optimizer\", .*set one of them",
        ),
        (
            {"optimizer_offload_fraction": 0.5, "moments_dtype": "bfloat16"},
            r"moments_dtype = \"bfloat16\" cannot be had with .*_fraction = 0\.5",
        ),
        (
            {"vision_lr_scale": 0.5},
            r"learner\.vision_lr_scale = 0\.5 has a meaning with learner\.vision = \"trained\"",
        ),
        ({"offload": ["activations"]}, 'each one of "weights".*got ."activations".'),
        ({"save_final": True}, r"unknown setting learner\.save_final"),
    ]:
        refused(run, message, learner=learner)


def test_a_warm_up_longer_than_the_run_is_fine_where_nothing_decays(run: Table):
    learner = {"lr_warmup_steps": 100}
    assert learner_settings({"run": run, "learner": learner}).learner.lr_warmup_steps == 100


def test_traces_are_of_steps_in_order_and_of_ranks_there_are(run: Table):
    refused(run, r"profile\.steps must be \[first, last\], got \[4, 2\]", profile={"steps": [4, 2]})
    refused(run, r"rank 1, there are 1 \(learner\.ranks\)", profile={"ranks": [0, 1]})
    refused(
        run,
        "profile.steps must be a list of 2, each a whole number of at least 1",
        profile={"steps": [0, 2]},
    )


def test_nodes_have_the_same_number_of_whole_replicas(run: Table):
    shared = r"ranks_per_node = 1 is not a multiple of learner\.tensor_parallel = 2"
    refused(run, shared, learner={"ranks": 4, "ranks_per_node": 1, "tensor_parallel": 2})
    placed = {"ranks": 4, "ranks_per_node": 2, "tensor_parallel": 2}
    assert learner_settings({"run": run, "learner": placed}).layout.nodes == 2


def test_every_minibatch_has_a_trajectory_for_each_replica(run: Table):
    small = {**run, "group_size": 2, "groups_per_step": 4}
    fits = {"ranks": 2, "minibatches": 4}
    assert learner_settings({"run": small, "learner": fits}).learner.minibatches == 4
    refused(small, "minibatches = 5 for 2 replicas", learner={**fits, "minibatches": 5})


def test_what_to_resume_from_must_be_a_checkpoint(run: Table, tmp_path: Path):
    refused({**run, "resume_from": str(tmp_path / "none")}, "none is no checkpoint")


def test_learner_that_finds_its_own_checkpoint_needs_none_by_name(run: Table):
    named = {**run, "resume_from": "/gone/step-000004"}
    settings = learner_settings({"run": named}, may_resume=True)
    assert settings.resume_from == Path("/gone/step-000004")
    assert settings.resumed(Path("/there/step-000008")).run.resume_from == "/there/step-000008"


def test_an_address_of_a_teacher_with_a_password_is_refused_before_it_is_written_down(run: Table):
    with pytest.raises(ConfigError, match=r"algo\.teacher\.endpoint must be .*") as error:
        learner_settings({"run": run, "algo": {"teacher": {"endpoint": "http://me:secret@h:1"}}})
    assert "secret" not in str(error.value)
    table: Table = {"run": run, "algo": {"teacher": {"endpoint": "http://h:30000"}}}
    assert learner_settings(table).algo.teacher["endpoint"] == "http://h:30000"
