"""Which role runs where, and what memory that takes."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.launch.plan import plan_roles
from slipstream.deploy.predict.laws.figure import total
from slipstream.deploy.predict.laws.gpus import Cluster, gpu_named
from slipstream.deploy.predict.laws.learner_step import Work, step_figures
from slipstream.deploy.predict.laws.shapes import shape_folder
from slipstream.deploy.predict.memory.gpu import (
    GIB,
    RESERVE_GIB,
    fewest_tensor_ranks,
    generator_memory,
    kv_bytes_per_token,
    learner_memory,
    shadow_bytes,
    static_share,
)
from slipstream.deploy.predict.memory.learner_rank import MemoryPart, total_bytes
from slipstream.deploy.preflight.dry_run import print_dry_run
from slipstream.learner.model.division import refuse_policy
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.settings.load import load_table
from tests.support.checkpoint_infos import write_checkpoint
from tests.support.planned import H100

CONFIGS = Path(__file__).parents[4] / "configs"
PAGE = CONFIGS.parent / "docs" / "parallelism.md"
ARCHITECTURES = {
    "qwen2.5-1.5b-1gpu": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-8b-16gpu": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


# Mixtures and hybrids by the names of their shapes and of the GPUs that their files mean.
PLANNED = {
    "qwen3.5-4b-1gpu": ("Qwen3.5-4B", "H100"),
    "qwen3.5-35b-a3b-8gpu": ("Qwen3.5-35B-A3B", "H100"),
    "qwen3-30b-a3b-16gpu": ("Qwen3-30B-A3B", "H100"),
    "qwen3-235b-a22b-128gpu": ("Qwen3-235B-A22B", "H100"),
    "deepseek-v3-512gpu": ("DeepSeek-V3", "H200"),
}


def config_of(name: str, folder: Path, *overrides: str) -> RunConfig:
    """A shipped file with the real model's architecture, and no weights."""
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES[name]))
    return run_config(load_table(CONFIGS / f"{name}.toml", [f"run.model={folder}", *overrides]))


def architecture(name: str, folder: Path) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES[name]))
    return load_hf_config(folder)


def test_parameters_are_counted_as_published(tmp_path: Path):
    for name, count in [("qwen2.5-1.5b-1gpu", 1_543_714_304), ("qwen3-8b-16gpu", 8_190_735_360)]:
        assert architecture(name, tmp_path).num_parameters == count


def test_the_cache_of_a_token_is_that_of_its_keys_and_values(tmp_path: Path):
    assert kv_bytes_per_token(architecture("qwen3-8b-16gpu", tmp_path)) == 2 * 2 * 36 * 8 * 128


def test_two_hosts_give_the_learner_one_and_the_generators_the_other(tmp_path: Path):
    config = config_of("qwen3-8b-16gpu", tmp_path)
    plans = {plan.name: plan for plan in plan_roles(config, Path("resolved.toml"), gpus=())}
    assert (plans["learner"].host, plans["learner"].gpus) == ("node-0", tuple(range(8)))
    assert [(plans[f"generator-{i}"].host, plans[f"generator-{i}"].gpus) for i in (0, 7)] == [
        ("node-1", (0,)),
        ("node-1", (7,)),
    ]
    assert plans["generator-3"].environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert (plans["broker"].host, plans["broker"].gpus) == ("node-0", None)
    assert len(plans) == 18


def test_engines_of_several_gpus_lie_on_one_host_each(tmp_path: Path):
    split = ("generators.sglang.tp_size=4", "generators.count=2")
    config = config_of("qwen3-8b-16gpu", tmp_path, *split)
    plans = {plan.name: plan for plan in plan_roles(config, Path("resolved.toml"), gpus=())}
    assert [(plans[f"generator-{i}"].host, plans[f"generator-{i}"].gpus) for i in (0, 1)] == [
        ("node-1", (0, 1, 2, 3)),
        ("node-1", (4, 5, 6, 7)),
    ]
    assert plans["generator-1"].environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    too_many = config_of("qwen3-8b-16gpu", tmp_path, split[0], "generators.count=3")
    with pytest.raises(ConfigError, match=r"count = 3 of 4 GPUs each \(.*\) need 20, unless"):
        plan_roles(too_many, Path("resolved.toml"), gpus=())
    too_large = config_of("qwen2.5-1.5b-1gpu", tmp_path, "generators.sglang.tp_size=2")
    with pytest.raises(ConfigError, match=r"tp_size = 2, but a host has 1 GPUs"):
        plan_roles(too_large, Path("resolved.toml"), gpus=())


def test_engines_on_several_hosts_are_left_to_whoever_starts_them(tmp_path: Path):
    split = ("generators.sglang.tp_size=4", "generators.nodes=2")
    config = config_of("qwen3-8b-16gpu", tmp_path, *split, "generators.count=1")
    start = r"start-generator --config run\.toml --name generator-0 --rendezvous .* --follow 1$"
    with pytest.raises(ConfigError, match=rf"nodes = 2: .* generators\.count = 0 .* {start}"):
        plan_roles(config, Path("resolved.toml"), gpus=())
    by_hand = config_of("qwen3-8b-16gpu", tmp_path, *split, "generators.count=0")
    names = [plan.name for plan in plan_roles(by_hand, Path("resolved.toml"), gpus=())]
    assert [name for name in names if name.startswith("generator")] == []


def test_one_gpu_is_shared_only_when_asked(tmp_path: Path):
    config = config_of("qwen2.5-1.5b-1gpu", tmp_path)
    plans = {plan.name: plan for plan in plan_roles(config, Path("resolved.toml"), gpus=())}
    assert plans["learner"].gpus == plans["generator-0"].gpus == (0,)
    apart = config_of("qwen2.5-1.5b-1gpu", tmp_path, "deploy.share_gpus=false")
    with pytest.raises(ConfigError, match=r"has 1 GPUs; learner\.ranks = 1 and generators\.count"):
        plan_roles(apart, Path("resolved.toml"), gpus=())


def test_restarted_learner_gets_the_epoch_saved_before_this_start(tmp_path: Path):
    for epoch, step in ((1, 20), (2, 40), (3, 10)):
        saved = write_checkpoint(tmp_path / "runs" / "a", epoch, step)
    run = (f"run.dir={tmp_path}/runs", "run.name=a")
    for resume_from, added in ((saved, ("--begun-after", "3")), ("", ())):
        config = config_of("qwen2.5-1.5b-1gpu", tmp_path, *run, f"run.resume_from={resume_from}")
        plans = {plan.name: plan for plan in plan_roles(config, Path("resolved.toml"), gpus=())}
        assert plans["learner"].restart_arguments == ("--resume", "auto", *added)


def test_more_ranks_than_gpus_on_a_host_are_refused(tmp_path: Path):
    config = config_of("qwen3-8b-16gpu", tmp_path, "deploy.gpus_per_host=4")
    with pytest.raises(ConfigError, match=r"learner\.ranks = 8, but node-0 has 4 GPUs"):
        plan_roles(config, Path("resolved.toml"), gpus=())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_shipped_configs_fit_into_80_gib_by_the_estimate(name: str, tmp_path: Path):
    config = config_of(name, tmp_path)
    hf = load_hf_config(tmp_path)
    learner = sum(part.num_bytes for part in learner_memory(hf, config.learner)) / GIB
    cache = generator_memory(hf, config)[1]
    assert learner < 80
    assert cache.num_bytes > 0
    if config.deploy.share_gpus:
        both = learner + sum(part.num_bytes for part in generator_memory(hf, config)[:-1]) / GIB
        assert both < 80


def test_a_larger_gpu_has_more_cache_and_no_other_weights(tmp_path: Path):
    config = config_of("qwen3-8b-16gpu", tmp_path, "generators.shadow=false")
    hf = load_hf_config(tmp_path)
    larger = config.with_settings("deploy", gpu_memory_gib=config.deploy.gpu_memory_gib + 10)
    weights, cache, _ = zip(generator_memory(hf, config), generator_memory(hf, larger), strict=True)
    assert weights[0].num_bytes == weights[1].num_bytes
    share = static_share(config.generators.generators)
    assert cache[1].num_bytes - cache[0].num_bytes == pytest.approx(share * 10 * 2**30)


def test_versions_of_adapters_take_their_places_from_the_cache(tmp_path: Path):
    settings = (
        "generators.shadow=false",
        "run.max_staleness_steps=1",
        "generators.sglang.tp_size=2",
    )
    plain = config_of("qwen3-8b-16gpu", tmp_path, *settings)
    named = config_of("qwen3-8b-16gpu", tmp_path, *settings, "lora.rank=16")
    hf = load_hf_config(tmp_path)
    parts = {part.what: part.num_bytes for part in generator_memory(hf, named)}
    hidden, inner, queries, keys = 4096, 12288, 4096, 1024
    of_attention = 3 * hidden + queries // 2 + 2 * keys // 2 + queries // 2 + hidden
    of_mlp = 2 * (hidden + inner // 2) + inner // 2 + hidden
    # Versions 0 and 1 steps old, and a place for answers without one; A and B of a rank of two.
    element = 4 if named.generators.dtype == "float32" else 2
    assert parts["versions of adapters"] == element * 3 * 36 * 16 * (of_attention + of_mlp)
    cache = generator_memory(hf, named)[1].num_bytes
    assert generator_memory(hf, plain)[1].num_bytes - cache == parts["versions of adapters"]
    merged = config_of("qwen3-8b-16gpu", tmp_path, *settings, "lora.rank=16", "lora.publish=merged")
    assert generator_memory(hf, merged) == generator_memory(hf, plain)


def test_an_engine_keeps_a_second_copy_where_the_cache_keeps_three_quarters(tmp_path: Path):
    config = config_of("qwen2.5-1.5b-1gpu", tmp_path, "deploy.share_gpus=false")
    hf = load_hf_config(tmp_path)
    without = config.with_settings("generators", shadow=False)
    (weights, cache, shadow, _), (_, alone, _) = (
        generator_memory(hf, config),
        generator_memory(hf, without),
    )
    assert shadow.num_bytes == weights.num_bytes == alone.num_bytes - cache.num_bytes
    assert shadow_bytes(generator_memory(hf, config)) == shadow.num_bytes
    small = config.with_settings("deploy", gpu_memory_gib=16)
    assert not shadow_bytes(generator_memory(hf, small))


def test_optimizer_memory_is_split_over_tensor_parallel_ranks(tmp_path: Path):
    config = config_of("qwen3-8b-16gpu", tmp_path, "learner.tensor_parallel=8")
    hf = load_hf_config(tmp_path)
    parts = {part.what: part.num_bytes for part in learner_memory(hf, config.learner)}
    copied = 36 * (2 * 4096 + 2 * 128) + 4096  # norms: of layers, of queries and keys, the last
    assert parts["main weights"] + parts["moments"] == 12 * (
        (hf.num_parameters - copied) / 8 + copied
    )


def test_the_learner_is_judged_by_the_stage_that_needs_most(tmp_path: Path):
    stages = ("learner.tensor_parallel=4", "learner.pipeline_parallel=2")
    config = config_of("qwen3-8b-16gpu", tmp_path, *stages, "learner.layers_per_stage=[30,6]")
    memory = learner_memory(load_hf_config(tmp_path), config.learner)
    parts = {part.what: part.num_bytes for part in memory}
    assert "logits" not in parts, "those are on the last stage, which has few layers"
    layer = 2 * (4096 + 128) + (2 * (4096 + 1024) * 4096 + 3 * 4096 * 12288) / 4
    assert parts["gradients"] == 4 * (30 * layer + 151936 * 4096 / 4)


def test_attention_groups_hold_the_whole_attention_each(tmp_path: Path):
    ranks, groups = "generators.sglang.tp_size=4", "generators.sglang.attn_dp_size=2"
    split = config_of("qwen3-8b-16gpu", tmp_path, ranks)
    grouped = config_of("qwen3-8b-16gpu", tmp_path, ranks, groups)
    hf = load_hf_config(tmp_path)
    weights, more = (generator_memory(hf, one)[0].num_bytes for one in (split, grouped))
    projections = hf.num_hidden_layers * hf.hidden_size * (hf.sizes["queries"] + hf.sizes["keys"])
    embedding = hf.vocab_size * hf.hidden_size
    assert more - weights == 2 * (2 * projections + embedding) / 4
    of_a_token = kv_bytes_per_token(hf) // 2
    assert f"{of_a_token:,} bytes a token" in generator_memory(hf, grouped)[1].formula


def test_a_reference_and_a_critic_take_memory_of_their_own(tmp_path: Path):
    config = config_of("qwen3-8b-16gpu", tmp_path, "learner.tensor_parallel=8")
    hf = load_hf_config(tmp_path)
    alone = sum(part.num_bytes for part in learner_memory(hf, config.learner))
    both = learner_memory(hf, config.learner, frozen=[hf], has_critic=True)
    copied = 36 * (2 * 4096 + 2 * 128) + 4096
    own = (hf.num_parameters - copied) / 8 + copied
    critic = own - 151936 * 4096 / 8 + 4096 + 1  # a value head in place of the output layer
    assert sum(part.num_bytes for part in both) - alone == 2 * own + 18 * critic


def test_a_dry_run_prints_processes_commands_and_memory(tmp_path: Path):
    config = config_of("qwen2.5-1.5b-1gpu", tmp_path)
    plans = plan_roles(config, Path("resolved.toml"), gpus=())
    console = Console(file=(written := io.StringIO()), width=200)
    print_dry_run(config, plans, console)
    text = written.getvalue()
    assert "5 processes on 1 host" in text
    assert "CUDA_VISIBLE_DEVICES=0" in text
    assert "-m slipstream.learner.main --config resolved.toml" in text
    assert "8 N / d, two moments; d = 1" in text
    assert "learner and generator on one GPU" in text
    assert "NOT fit" not in text


def test_fewest_tensor_ranks_are_those_whose_rank_fits_with_the_replicas_that_they_leave(
    tmp_path: Path,
):
    config = config_of("qwen3-8b-16gpu", tmp_path)
    hf, whole = load_hf_config(tmp_path), "learner.tensor_parallel=8"

    def fewest(gib: float, *overrides: str) -> int:
        given = config_of("qwen3-8b-16gpu", tmp_path, *overrides)
        return fewest_tensor_ranks(hf, given.learner, gib * GIB)

    needed = sum(part.num_bytes for part in learner_memory(hf, config.learner)) / GIB
    assert [fewest(needed + room, whole) for room in (0.01, -0.01)] == [2, 4]
    assert fewest(1000, whole) == fewest(1000) == 1
    assert fewest(1, whole) == 8
    assert fewest(76) == 2, "the shipped layout is the smallest that fits"
    few = ("run.groups_per_step=1", "run.group_size=16", "learner.minibatches=8")
    assert fewest(1000, whole, *few) == 4, "two replicas have eight minibatches of one trajectory"


def test_a_dry_run_warns_where_a_smaller_tensor_parallel_size_fits(tmp_path: Path):
    def printed(*overrides: str) -> str:
        config = config_of("qwen3-8b-16gpu", tmp_path, *overrides)
        plans = plan_roles(config, Path("resolved.toml"), gpus=())
        console = Console(file=(written := io.StringIO()), width=200)
        assert print_dry_run(config, plans, console)
        return written.getvalue()

    warning = "learner.tensor_parallel = 2 fits, too, and the settings have 8"
    assert warning in printed("learner.tensor_parallel=8")
    assert "fits, too" not in printed()


def test_the_shipped_config_has_the_figures_of_its_plan(tmp_path: Path):
    config = config_of("qwen3-8b-16gpu", tmp_path)
    hf = load_hf_config(tmp_path)
    text = (CONFIGS / "qwen3-8b-16gpu.toml").read_text().replace("\n# ", " ")
    gib = {part.what: part.num_bytes / GIB for part in learner_memory(hf, config.learner)}
    assert f"a rank holds {sum(gib.values()):.1f} GiB" in text
    optimizer = gib["main weights"] + gib["moments"]
    for what, size in (*gib.items(), ("the optimizer", optimizer)):
        if what in {"weights", "gradients", "the optimizer"}:
            assert f"{what} {size:.1f}" in text
    working = gib["activations"] + gib["logits"]
    assert f"activations and logits {working:.1f}" in text
    work = Work(trajectories=64 * 16, mean_tokens=4200, mean_prompt=200)

    def step(*overrides: str) -> dict[str, float]:
        learner = config_of("qwen3-8b-16gpu", tmp_path, *overrides).learner
        return {part.what: part.value for part in step_figures(hf, learner, work, H100)}

    own = step()
    assert f"is predicted to take {sum(own.values()):.0f} s" in text
    again = ("learner.recompute=none", "learner.recompute_layers=0")
    other = sum(step("learner.tensor_parallel=8", *again).values())
    assert f"(tensor_parallel = 8, nothing computed again: {other:.0f} s)" in text
    assert f"{own['tensor parallelism']:.1f} s for exchanges within layers" in text
    assert f"{own['gradients and weights of replicas']:.1f} s for gradients" in text


OTHERS = [path for path in sorted(CONFIGS.glob("*.toml")) if path.stem not in PLANNED]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path: Path, tmp_path: Path):
    shape = ARCHITECTURES["qwen3-8b-16gpu"] | {"vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    run_config(load_table(path, [f"run.model={tmp_path}"]))


@pytest.mark.parametrize("name", PLANNED)
def test_files_that_never_ran_say_what_is_planned_and_predicted(name: str):
    shape, gpu = shape_folder(PLANNED[name][0]), gpu_named(PLANNED[name][1])
    path = CONFIGS / f"{name}.toml"
    config = run_config(load_table(path, [f"run.model={shape}"]))
    hf = load_hf_config(shape)
    refuse_policy(hf, config.learner)
    generators, hosts = config.generators.generators, len(config.deploy.hosts)
    engines = generators.count or 16  # as the file says
    gpus = config.learner.learner.ranks
    gpus += engines * generators.num_ranks * (not config.deploy.share_gpus)
    assert gpus == hosts * config.deploy.gpus_per_host
    assert name.endswith(f"-{gpus}gpu")
    assert plan_roles(config, Path("resolved.toml"), gpus=())
    gib = total_bytes(learner_memory(hf, config.learner)) / GIB
    assert gib < gpu.memory_gib - RESERVE_GIB
    cache = generator_memory(hf, config)[1]
    assert int(re.findall(r"([0-9,]+) sequences", cache.what)[0]) > 4
    work = Work(trajectories=64 * 16, mean_tokens=4200, mean_prompt=200)
    seconds = total(step_figures(hf, config.learner, work, Cluster(gpu=gpu)))
    text = path.read_text()
    assert f"{gib:.1f} GiB" in text
    assert f"predicted to take {seconds:.0f} s" in text
    assert "never run" in " ".join(text.replace("#", " ").split())
    row = f"| [{name}](../configs/{name}.toml) | {gpus} |"
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(row))
    assert f"| {gib:.1f} | {seconds:.0f} |" in line


def test_weights_and_cache_in_fp8_are_planned_with_a_byte_each():
    shape = shape_folder("Qwen3-30B-A3B")
    path = CONFIGS / "qwen3-30b-a3b-16gpu.toml"

    def memory(*overrides: str) -> list[MemoryPart]:
        given = [f"run.model={shape}", "generators.shadow=false", *overrides]
        return generator_memory(load_hf_config(shape), run_config(load_table(path, given)))

    wide, narrow = memory(), memory("weightbus.precision=fp8")
    assert (wide[0].what, narrow[0].what) == ("weights, bfloat16", "weights, fp8")
    assert narrow[0].num_bytes / wide[0].num_bytes == pytest.approx(0.5105, abs=1e-4)
    saved = wide[0].num_bytes - narrow[0].num_bytes
    assert narrow[1].num_bytes == pytest.approx(wide[1].num_bytes + saved)
    cache = memory("generators.sglang.kv_cache_dtype=fp8_e4m3")

    def cached(parts: list[MemoryPart]) -> int:
        return int(re.findall(r"([0-9,]+) tokens", parts[1].what)[0].replace(",", ""))

    assert cached(cache) == pytest.approx(2 * cached(wide), abs=1)
