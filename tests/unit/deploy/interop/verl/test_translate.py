"""What keys of verl become: each kind, the seven traps, and what keys say together."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from slipstream.algos.config import choice_of
from slipstream.algos.section import AlgoSection
from slipstream.deploy.config import run_config
from slipstream.deploy.interop.verl.hydra import overrides_of
from slipstream.deploy.interop.verl.rows import TranslatedKey
from slipstream.deploy.interop.verl.topics.data import source_names
from slipstream.deploy.interop.verl.translate import Translation, translate
from slipstream.wire.settings.load import load_table, section
from tests.support.blank_model import write_blank_model
from tests.support.verl_keys import COMMON, DAPO, GRPO, MEGATRON, PPO, words

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


def translated(
    *given: str, home: str = "", vocab_size: int = 0, is_async: bool = False
) -> Translation:
    keys = overrides_of(["algorithm.adv_estimator=grpo", *given])
    return translate(keys, home=home, vocab_size=vocab_size, is_async=is_async)


def setting(found: Translation, name: str) -> object:
    """Return a setting of a translation, or None."""
    value: Any = found.table
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def told(found: Translation, key: str) -> TranslatedKey:
    """Return what is said of a key that was given, or of a default."""
    return next(one for one in found.keys if one.key == key)


# ---- kinds ---------------------------------------------------------------------


def test_a_key_is_kept_renamed_changed_dropped_or_unknown():
    found = translated(
        "data.shuffle=False",
        "data.max_prompt_length=99",
        "data.filter_overlong_prompts=True",
        "trainer.balance_batch=True",
        "data.shufle=True",
    )
    kinds = {one.key: one.kind for one in found.keys if not one.is_default}
    assert kinds["data.shuffle"] == "kept"
    assert kinds["data.max_prompt_length"] == "renamed"
    assert kinds["data.filter_overlong_prompts"] == "changed"
    assert kinds["trainer.balance_batch"] == "dropped"
    assert kinds["data.shufle"] == "unknown"
    assert told(found, "data.shufle").remark == "not known; did you mean data.shuffle?"
    assert [one.key for one in found.failed] == ["data.shufle"]


def test_every_key_is_told_once_and_nothing_else_is_without_a_reason():
    given = overrides_of(words(COMMON, GRPO, MEGATRON))
    found = translate(given)
    own = [one.key for one in found.keys if not one.is_default and one.value is not None]
    assert sorted(own) == sorted(key for key, value in given.values.items() if value is not None)
    assert all(one.remark or one.settings for one in found.keys)
    assert all(one.remark for one in found.keys if one.kind in {"dropped", "unknown"})
    assert all(one.remark or one.settings for one in found.keys if one.kind == "changed")


def test_a_null_is_not_set_and_a_deleted_key_is_told():
    found = translated("data.seed=null", "~data.shuffle")
    assert told(found, "data.seed").remark == "null: not set"
    assert told(found, "data.shuffle").remark == "taken away by ~"
    assert setting(found, "run.seed") is None


def test_verls_defaults_are_written_where_ours_differ_and_the_key_is_not_given():
    found = translated()
    written = {one.key: one.settings for one in found.keys if one.is_default}
    assert written[f"{ACTOR}.clip_ratio_c"] == {"algo.surrogate.clip_dual": 3.0}
    assert written[f"{ACTOR}.optim.weight_decay"] == {"learner.weight_decay": 0.01}
    assert written["data.train_batch_size"] == {"run.groups_per_step": 1024}
    assert written[f"{ROLLOUT}.n"] == {"run.group_size": 1}
    assert setting(found, "learner.adam_beta2") == 0.999
    assert setting(found, "broker.drop_zero_variance") is False
    found = translated(f"{ACTOR}.clip_ratio_c=10.0", f"{ROLLOUT}.n=4")
    assert setting(found, "algo.surrogate.clip_dual") == 10.0
    assert not [one for one in found.keys if one.is_default and one.key.endswith(".n")]


def test_defaults_of_gae_are_of_gae_alone():
    found = translate(overrides_of([]))
    assert setting(found, "algo.advantage.decay") == 1.0
    assert setting(found, "algo.critic.clip") == 0.5
    assert setting(found, "algo.whiten") == "batch"
    assert setting(translated(), "algo.critic.clip") is None


# ---- the seven traps -----------------------------------------------------------


def test_trap_never_is_zero():
    found = translated("trainer.test_freq=-1", "trainer.save_freq=-1")
    assert setting(found, "eval.every_steps") == 0
    assert setting(found, "eval.at_end") is False
    assert setting(found, "checkpoint.every_steps") == 0
    assert setting(translated("trainer.test_freq=5"), "eval.every_steps") == 5


def test_trap_the_console_is_no_tracker():
    for value, trackers in [
        ("console", []),
        ("['console','wandb']", ["wandb"]),
        ('["console","tensorboard","file","clearml"]', ["tensorboard"]),
    ]:
        found = translated(f"trainer.logger={value}")
        assert setting(found, "logging.trackers") == trackers
        assert "the console is always written to" in told(found, "trainer.logger").remark


def test_trap_more_than_the_vocabulary_is_all_of_it():
    for top_k, vocabulary, expected in [
        (-1, 0, -1),
        (0, 0, -1),
        (1_000_000, 0, -1),
        (50_000, 50_000, -1),
        (50_000, 60_000, 50_000),
        (20, 0, 20),
    ]:
        found = translated(f"{ROLLOUT}.top_k={top_k}", vocab_size=vocabulary)
        assert setting(found, "sampling.top_k") == expected
        assert setting(found, "sampling.kept_tokens") == ("drop" if expected > 0 else None)


@pytest.mark.parametrize(
    ("filters", "truncation", "expected"),
    [
        ("True", "error", "drop"),
        ("True", "left", "drop"),
        ("False", "error", "error"),
        ("False", "left", "truncate"),
        ("False", "right", "truncate"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_trap_two_keys_of_one_setting(filters: str, truncation: str, expected: str, turned: bool):
    keys = [f"data.filter_overlong_prompts={filters}", f"data.truncation={truncation}"]
    found = translated(*(keys[::-1] if turned else keys))
    assert setting(found, "sampling.overlong_prompts") == expected


def test_trap_grpo_is_no_preset_of_the_paper():
    found = translated()
    choice = choice_of(section(found.table, "algo", AlgoSection))
    assert choice.advantage.part.name == "grpo"
    assert not choice.has_kl
    assert choice.reduce.name == "token-mean"
    assert choice.anchor == "proximal"


def test_trap_epochs_end_the_run():
    found = translated("trainer.total_epochs=15")
    assert setting(found, "run.epochs") == 15.0
    assert setting(found, "run.steps") == 1_000_000
    found = translated("trainer.total_epochs=15", "trainer.total_training_steps=70")
    assert setting(found, "run.steps") == 70


def test_trap_gpus_are_divided():
    for given, ranks, count, per_node in [
        ((), 4, 2, None),
        ((f"{ROLLOUT}.tensor_model_parallel_size=4",), 4, 1, None),
        ((f"{ACTOR}.megatron.tensor_model_parallel_size=8",), 8, 1, None),
        (("trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1"), 1, 1, None),
        (("trainer.nnodes=4",), 16, 8, 8),
        (("trainer.nnodes=2", f"{ACTOR}.megatron.context_parallel_size=4"), 8, 4, None),
    ]:
        found = translated(f"{ROLLOUT}.n=8", *given)
        assert setting(found, "learner.ranks") == ranks
        assert setting(found, "generators.count") == count
        assert setting(found, "learner.ranks_per_node") == per_node


@pytest.mark.parametrize(
    ("experts", "ranks", "expected", "kind"),
    [
        (4, 4, 4, "renamed"),
        (2, 4, 2, "renamed"),
        (16, 8, 8, "changed"),
        (8, 1, None, "changed"),
        (8, 3, None, "changed"),
        (1, 8, None, "dropped"),
    ],
)
def test_trap_an_engine_has_the_experts_of_its_own_ranks(
    experts: int, ranks: int, expected: int | None, kind: str
):
    key = f"{ROLLOUT}.expert_parallel_size"
    found = translated(f"{ROLLOUT}.tensor_model_parallel_size={ranks}", f"{key}={experts}")
    assert setting(found, "generators.sglang.ep_size") == expected
    assert told(found, key).kind == kind


def test_trap_hosts_are_named():
    found = translated("trainer.nnodes=2")
    assert told(found, "trainer.nnodes").kind == "changed"
    assert any(one.startswith("deploy.hosts: the names of your 2 hosts") for one in found.todo)


# ---- keys together -------------------------------------------------------------


@pytest.mark.parametrize(("batch", "mini", "expected"), [(1024, 256, 4), (32, 64, 1), (100, 30, 3)])
def test_minibatches_are_counted(batch: int, mini: int, expected: int):
    found = translated(f"data.train_batch_size={batch}", f"{ACTOR}.ppo_mini_batch_size={mini}")
    assert setting(found, "learner.minibatches") == expected


def test_microbatches_are_of_all_ranks_of_a_sequence_and_hold_the_longest():
    keys = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=3000")
    name = "learner.max_tokens_per_microbatch"
    assert setting(translated(*keys), name) == 3000
    assert setting(translated(*keys, f"{ACTOR}.ulysses_sequence_parallel_size=4"), name) == 12000
    assert setting(translated(*keys, "data.max_response_length=9000"), name) == 9512
    assert setting(translated("data.max_response_length=9000"), name) == 9512
    assert setting(translated(), name) is None


def test_a_large_step_raises_the_high_water_mark():
    found = translated(f"{ROLLOUT}.n=16", "data.max_response_length=20480")
    assert setting(found, "broker.high_water_bytes") == 1024 * 16 * (512 + 20480) * 13


def test_offload_is_one_list_without_what_has_no_use():
    keys = [f"{ACTOR}.megatron.{what}_offload=True" for what in ("param", "grad", "optimizer")]
    assert setting(translated(*keys), "learner.offload") == ["gradients", "optimizer"]
    found = translated(*keys, f"{ACTOR}.use_kl_loss=True")
    assert setting(found, "learner.offload") == ["weights", "gradients", "optimizer"]
    host = f"{ACTOR}.optim.override_optimizer_config."
    found = translated(
        *keys, f"{host}optimizer_cpu_offload=True", f"{host}optimizer_offload_fraction=0.5"
    )
    assert setting(found, "learner.offload") == ["gradients"]
    assert setting(found, "learner.optimizer_offload_fraction") == 0.5


def test_a_kl_has_one_place():
    found = translated(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl")
    expected = {"place": "loss", "coefficient": 0.001, "name": "k1"}
    assert setting(found, "algo.kl") == expected
    found = translated("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02")
    assert setting(found, "algo.kl") == {"place": "reward", "coefficient": 0.02, "name": "k1"}
    found = translated("algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True")
    assert [one.key for one in found.failed] == ["algorithm.use_kl_in_reward"]
    assert setting(translated(f"{ACTOR}.kl_loss_coef=0.1"), "algo.kl") is None


def test_rejection_has_verls_bounds():
    for rs, threshold, expected in [
        ("token_k2", "0.1", {"measure": "k2", "level": "token", "high": 0.1}),
        ("seq_mean_k3", "0.01", {"measure": "k3", "level": "sequence-mean", "high": 0.01}),
        ("seq_sum_k1", "0.5_2.0", {"measure": "ratio", "level": "sequence", "low": 0.5, "high": 2}),
        (
            "geometric",
            "0.8_1.25",
            {"measure": "ratio", "level": "geometric", "low": 0.8, "high": 1.25},
        ),
    ]:
        keys = (f"{CORRECTION}.rollout_rs={rs}", f"{CORRECTION}.rollout_rs_threshold={threshold}")
        found = translated(*keys)
        assert setting(found, "algo.correction.rejection") == expected
        assert setting(found, "algo.reduce.denominator") == "kept"
        choice_of(section(found.table, "algo", AlgoSection))


def test_the_penalty_of_length_is_a_share():
    place = "reward_model.reward_kwargs.overlong_buffer_cfg"
    keys = ("data.max_response_length=1000", f"{place}.len=250", f"{place}.penalty_factor=2.0")
    found = translated(*keys, f"{place}.enable=True")
    assert setting(found, "algo.data") == {"overlong_buffer": 0.25, "overlong_penalty": 2.0}
    assert setting(translated(*keys, f"{place}.enable=False"), "algo.data") is None


def test_a_reward_function_takes_its_arguments_along():
    found = translated(
        "custom_reward_function.path=mine.py",
        "custom_reward_function.name=score",
        "custom_reward_function.reward_kwargs.beta=0.5",
    )
    assert found.table["reward"] == {"function": "mine.py:score", "options": {"beta": 0.5}}


def test_without_a_function_verls_scores_are_by_data_source():
    found = translated("reward_model.reward_kwargs.beta=0.5")
    assert setting(found, "reward.function") == "slipstream.broker.rewards.math_answer:score"
    sources = setting(found, "reward.sources")
    assert isinstance(sources, dict)
    assert sources["openai/gsm8k"] == {"function": "slipstream.broker.rewards.numeric:score"}
    assert setting(found, "reward.options") is None


def test_several_files_are_sources_with_names():
    found = translated(
        "data.train_files=['~/gsm8k/train.parquet','~/math/train.parquet']",
        "data.val_files=a/test.parquet",
        "data.val_max_samples=32",
        home="/home/me",
    )
    assert found.table["data"] == {
        "sources": {
            "gsm8k": {"file": "/home/me/gsm8k/train.parquet"},
            "math": {"file": "/home/me/math/train.parquet"},
        }
    }
    assert setting(found, "eval.sets") == {"a": {"file": "a/test.parquet", "max_rows": 32}}
    assert source_names(["x/a.parquet", "y/a.parquet", "train.parquet", "z/t x.jsonl"]) == [
        "a",
        "a-2",
        "train",
        "t-x",
    ]


def test_evaluation_is_greedy_unless_it_samples():
    keys = (f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.temperature=0.6")
    assert setting(translated(*keys), "eval.samples") == 4
    found = translated(*keys, f"{ROLLOUT}.val_kwargs.do_sample=False")
    assert setting(found, "eval.samples") == 1
    assert setting(found, "eval.temperature") is None


@pytest.mark.parametrize(
    ("mode", "name", "reduce"),
    [("gspo", "gspo", "sequence-mean-token-mean"), ("cispo", "cispo", "token-mean")],
)
def test_surrogates_have_verls_mean_and_bounds(mode: str, name: str, reduce: str):
    found = translated(
        f"{ACTOR}.policy_loss.loss_mode={mode}",
        f"{ACTOR}.loss_agg_mode=token-mean",
        f"{ACTOR}.clip_ratio_high=0.3",
    )
    expected = {"name": name, "clip_low": 0.2, "clip_high": 0.3}
    assert setting(found, "algo.surrogate") == expected
    assert setting(found, "algo.reduce.name") == reduce


def test_asynchronous_runs_weigh_stale_answers():
    assert setting(translated(), "run.mode") == "sync"
    found = translated(is_async=True)
    assert setting(found, "run.mode") == "async"
    assert setting(found, "algo.correction.importance-sampling") == {"level": "token", "high": 5.0}
    found = translated(f"{CORRECTION}.bypass_mode=True", is_async=True)
    assert setting(found, "algo.anchor") == "behavior"
    assert setting(found, "algo.correction") is None


def test_tools_are_left_to_write():
    found = translated(
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=5",
        f"{ROLLOUT}.multi_turn.format=hermes",
        f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
    )
    assert found.table["environment"] == {"max_turns": 5, "tool_call_parser": "qwen25"}
    assert any(one.startswith("environment.function: ") for one in found.todo)
    assert not found.failed


def test_a_value_without_a_counterpart_is_not_translated():
    for given in [
        f"{ACTOR}.ppo_epochs=2",
        "algorithm.adv_estimator=remax",
        "algorithm.adv_estimator=mine",
        f"{ACTOR}.policy_loss.loss_mode=mine",
        f"{ACTOR}.loss_agg_mode=mine",
        f"{ROLLOUT}.temperature=0",
        f"{ROLLOUT}.top_k=1",
        f"{ROLLOUT}.n=many",
        "data.reward_fn_key=mine",
        "trainer.val_only=True",
        "data.max_prompt_length=1.5",
        f"{ACTOR}.optim.betas=0.9",
        f"{CORRECTION}.rollout_is=all",
        f"{CORRECTION}.loss_type=reinforce",
    ]:
        found = translated(given)
        assert [one.key for one in found.failed] == [given.partition("=")[0]]
        assert found.failed[0].remark


# ---- round trip ----------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        (),
        (COMMON,),
        (COMMON, GRPO),
        (COMMON, GRPO, MEGATRON),
        (COMMON, DAPO),
        (COMMON, PPO, MEGATRON),
    ],
    ids=["defaults", "common", "grpo", "grpo-megatron", "dapo", "ppo-megatron"],
)
def test_what_is_written_is_loaded_by_every_role(groups: tuple, is_async: bool, tmp_path: Path):
    write_blank_model(tmp_path / "model", hidden=16, layers=4)
    # The model has no experts, and no whole blocks of fp8.
    others = ("router_replay", "routing_replay", "rollout.quantization=")
    given = [word for word in words(*groups) if not any(name in word for name in others)]
    own = [f"actor_rollout_ref.model.path={tmp_path / 'model'}"]
    own += [] if groups else ["data.train_files=a.parquet", "data.max_response_length=500"]
    found = translate(overrides_of([*given, *own]), is_async=is_async)
    assert not found.failed
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(found.table))
    assert tomllib.loads(path.read_text()) == found.table
    config = run_config(load_table(path))
    assert config.run.mode == ("async" if is_async else "sync")
    choice_of(config.learner.algo)
