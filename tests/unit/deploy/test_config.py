import sys
from pathlib import Path

import pytest

from slipstream.deploy.config import free_name, run_config, with_contents, write_resolved
from slipstream.deploy.launch.plan import plan_roles
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import content_hash
from slipstream.wire.settings.load import Table, load_table
from slipstream.wire.settings.sections import RunSection
from tests.support.blank_model import write_blank_model


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """The smallest run there is."""
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    return {
        "run": {"name": "first", "dir": str(tmp_path), "model": str(tmp_path / "model")},
        "data": {"file": "train.jsonl"},
        "generators": {"device": "cpu"},
    }


def changed(table: Table, section: str, **values: object) -> Table:
    return {**table, section: {**table.get(section, {}), **values}}


OF_ENGINES = [  # values of [generators.sglang], and what is said of them
    ({"tp_size": 0}, r"tp_size must be an integer of at least 1, got 0"),
    ({"tp_size": 3}, r"must be a multiple of generators\.sglang\.tp_"),
    ({"nnodes": 2}, r"sglang\.nnodes follows from other settings"),
    ({"pp_size": 2}, r"pp_size must be 1: .* counts ranks .* got 2"),
    (
        {"tp_size": 4, "ep_size": 3},
        r"tp_size must be a multiple of generators\.sglang\.ep_size, got 4 and 3",
    ),
    ({"ep_size": 0}, r"ep_size must be an integer of at least 1, got 0"),
    ({"tp_size": 2, "ep_size": 2}, r"ep_size must be 1 for llama, which has no experts, got 2"),
    (
        {"moe_runner_backend": "flashinfer_trtllm"},
        r'moe_runner_backend must be "triton", got "flashinfer_trtllm": others lay experts out',
    ),
    ({"moe_a2a_backend": "deepep"}, r'moe_a2a_backend must be "none", got "deepep": ranks would'),
    ({"ep_num_redundant_experts": 2}, r"redundant_experts must be 0, got 2: .* moved or copied"),
    ({"enable_eplb": True}, r"enable_eplb must be false, got true: .* moved or copied"),
    ({"init_expert_location": "x.json"}, r'must be "trivial", got "x\.json": .* moved or copied'),
    ({"moe_dp_size": 2}, r"moe_dp_size must be 1: .* such split .* got 2"),
    (
        {"tp_size": 2, "attn_dp_size": 2},
        r"attn_dp_size must be 1 for llama: .* it does not for qwen3",
    ),
    (
        {"tp_size": 2, "attn_dp_size": 4},
        r"tp_size must be a multiple of generators\.sglang\.attn_dp_size, got 2 and 4",
    ),
    ({"attn_dp_size": "2"}, r"attn_dp_size must be an integer of at least 1, got '2'"),
    ({"attn_cp_size": 2}, r"attn_cp_size must be 1: .* split"),
    ({"quantization": "fp8"}, r"quantization must not be set: .* bit"),
    ({"speculative_algorithm": "NGRAM"}, r"speculative_algorithm must not be set: which version"),
    ({"dp_size": 2}, r"dp_size must be 1: .* generators\.count"),
    (
        {"disaggregation_mode": "prefill"},
        r'disaggregation_mode must be "null", got "prefill": .* of the old weights',
    ),
    ({"api_key": "x"}, r"api_key follows from other settings"),
    ({"log-level": "info"}, r"with underscores, log_level"),
]


@pytest.mark.parametrize(
    ("section", "values", "names"),
    [
        ("run", {"model": ""}, r"run\.model is not set"),
        (
            "run",
            {"model": "/nowhere"},
            r"no config\.json in /nowhere: a model is a folder .* \(run\.model\)",
        ),
        ("data", {"file": ""}, r"data\.file is not set"),
        (
            "learner",
            {"max_tokens_per_microbatch": 1000},
            r"= 1024 tokens does not fit into learner\.max_tokens_per_microbatch = 1000",
        ),
        ("sampling", {"max_response_tokens": 8_000}, r"run\.model has 1024 positions"),
        ("deploy", {"cores": {"learner": [999]}}, r"deploy\.cores\.learner = \[999\]"),
        ("deploy", {"share_gpus": True}, r"deploy\.share_gpus needs weightbus\.backend = gloo"),
        (
            "sampling",
            {"min_response_tokens": 600},
            r"min_response_tokens = 600 is more than sampling\.max_response_tokens = 512",
        ),
        ("learner", {"ranks": 3, "tensor_parallel": 2}, r"learner\.ranks = 3 is not a multiple"),
        ("learner", {"minibatches": 300}, r"256 trajectories cannot be split"),
        ("generators", {"max_cached_tokens": 100}, r"generators\.max_cached_tokens = 100"),
        ("broker", {"max_in_flight": 3}, r"broker\.max_in_flight is 3, .*groups_per_step = 32"),
        ("run", {"group_size": 1}, r"run\.group_size must be >= 2 .*got 1"),
        ("generators", {"max_sequences": 4}, r"does not hold one group of run\.group_size = 8"),
        (
            "eval",
            {"file": "held_out.jsonl", "samples": 100, "temperature": 1.0},
            r"does not hold the eval\.samples = 100 answers",
        ),
        ("generators", {"count": 10**8}, r"generators\.count must be at most 10000, got 100000000"),
        ("run", {"name": "a\0b"}, r"run\.name must be a plain folder name"),
        ("run", {"name": "a" * 300}, r"run\.name must have at most 200 bytes"),
        ("broker", {"redis": {"url": "redis://u:p@h"}}, r"broker\.redis\.password_file"),
        ("broker", {"redis": {"url": "unix://s?password=p"}}, r"broker\.redis\.password_file"),
        ("deploy", {"max_restart": 3}, r"deploy\.max_restart; did you mean max_restarts\?"),
        *(("generators", {"sglang": values}, names) for values, names in OF_ENGINES),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    table: Table, section: str, values: dict[str, object], names: str
):
    with pytest.raises(ConfigError, match=names):
        run_config(changed(table, section, **values))


def test_the_longest_trajectory_may_fill_a_microbatch(table: Table):
    exact = changed(table, "learner", max_tokens_per_microbatch=1024)
    assert run_config(exact).learner.learner.max_tokens_per_microbatch == 1024


def test_a_run_gets_the_first_name_without_a_folder(tmp_path: Path):
    run = RunSection(name="add", dir=str(tmp_path))
    assert free_name(run) == "add"
    (tmp_path / "add").mkdir()
    assert free_name(run) == "add-2"
    (tmp_path / "add-2").mkdir()
    (tmp_path / "add-4").mkdir()
    assert free_name(run) == "add-3"


def test_resolved_settings_make_the_same_run(table: Table, tmp_path: Path):
    config = run_config(changed(table, "broker", max_in_flight=64))
    path = tmp_path / "resolved.toml"
    write_resolved(config, path)
    again = run_config(load_table(path))
    found = (again.broker, again.generators, again.learner, again.deploy)
    assert found == (config.broker, config.generators, config.learner, config.deploy)


def test_every_url_of_a_run_is_held_to_the_content_of_its_start(table: Table, tmp_path: Path):
    url = f"file://{tmp_path}/model"
    algo = {
        "kl": {"coefficient": 0.1, "reference": url},
        "teacher": {"coefficient": 1.0, "model": f"{url}/"},
    }
    (tmp_path / "train.jsonl").write_text("{}")
    file = f"file://{tmp_path}/train.jsonl"
    run = run_config(changed({**table, "algo": algo}, "data", file=file))
    assert with_contents(run).run.contents == {
        name: content_hash(name, "test", is_model=name != file) for name in (url, f"{url}/", file)
    }


def test_a_model_beside_the_policy_that_is_not_used_is_not_asked_for(table: Table):
    algo = {
        "kl": {"coefficient": 0.0, "reference": "org/gone"},
        "teacher": {"coefficient": 0.0, "model": "file:///gone"},
    }
    assert with_contents(run_config({**table, "algo": algo})).run.contents == {}


def test_a_run_is_a_broker_then_generators_a_learner_and_reward_workers(table: Table):
    wanted = changed(changed(table, "generators", count=3), "reward", workers=2)
    resolved = Path("resolved.toml")
    plans = plan_roles(run_config(wanted), resolved, gpus=())
    assert [(plan.name, plan.restart_arguments) for plan in plans] == [
        ("broker", ("--restarted",)),
        ("generator-0", ()),
        ("generator-1", ()),
        ("generator-2", ()),
        ("learner", ("--resume", "auto")),
        ("reward-worker-0", ()),
        ("reward-worker-1", ()),
    ]
    shared = (sys.executable, "-m", "slipstream.generators.main", "--config", "resolved.toml")
    assert plans[1].command == (*shared, "--name", "generator-0")


def test_the_learner_gets_the_first_gpus_and_each_generator_one_of_its_own(table: Table):
    wanted = changed(changed(table, "generators", device="cuda", count=2), "learner", ranks=2)
    plans = plan_roles(run_config(wanted), Path("r.toml"), gpus=("0", "1", "2", "3"))
    gpus = {plan.name: plan.gpus for plan in plans}
    assert gpus["learner"] == (0, 1)
    assert (gpus["generator-0"], gpus["generator-1"]) == ((2,), (3,))
    assert gpus["broker"] is None


def test_a_job_with_some_gpus_of_its_host_uses_those(table: Table):
    wanted = changed(table, "generators", device="cuda", count=1)
    plans = plan_roles(run_config(wanted), Path("r.toml"), gpus=("5", "GPU-77"))
    shown = {plan.name: plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    assert (shown["learner"], shown["generator-0"], shown["broker"]) == ("5", "GPU-77", None)
    more = changed(wanted, "deploy", gpus_per_host=8)
    with pytest.raises(ConfigError, match=r"deploy\.gpus_per_host = 8, but 2 .*CUDA_VISIBLE_DEV"):
        plan_roles(run_config(more), Path("r.toml"), gpus=("5", "GPU-77"))
    assert plan_roles(run_config(more), Path("r.toml"), gpus=()), "planned where there are none"


def test_too_few_gpus_are_refused_with_the_settings_that_need_them(table: Table):
    wanted = changed(table, "generators", device="cuda", count=2)
    with pytest.raises(ConfigError, match=r"1 GPUs; learner\.ranks = 1 and generators\.count = 2"):
        plan_roles(run_config(wanted), Path("r.toml"), gpus=("0",))
