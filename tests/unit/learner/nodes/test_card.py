from pathlib import Path

import msgspec

from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.nodes.card import facts_of
from slipstream.wire.process.cards import difference
from slipstream.wire.settings.load import Table


def settings_of(folder: Path, **sections: Table) -> LearnerSettings:
    folder.mkdir(exist_ok=True)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    run = {"model": str(folder), "dir": "/shared", "name": "a"} | sections.pop("run", {})
    return learner_settings({"run": run, **sections})


def facts(settings: LearnerSettings, *, replays: bool = False) -> dict[str, str]:
    return facts_of(settings, replays=replays, resumes=False, device="gloo")


def test_nodes_of_one_run_have_all_in_common_wherever_the_model_is(tmp_path: Path):
    here = facts(settings_of(tmp_path / "a", learner={"threads": 1}))
    there = facts(settings_of(tmp_path / "b", learner={"threads": 8}))
    assert difference(here, there) == ""


def test_what_differs_is_named_with_both_values(tmp_path: Path):
    for sections, why in [
        ({"run": {"name": "b"}}, "run.name is b there, expected a"),
        ({"run": {"dir": "/other"}}, "run.dir with run.name is /other/a there, expected /shared/a"),
        ({"learner": {"ranks": 2}}, "learner.ranks is 2 there, expected 1"),
        ({"learner": {"dtype": "bfloat16"}}, "learner.dtype is bfloat16 there, expected auto"),
        ({"learner": {"lr": 1e-3}}, "learner.lr is 0.001 there, expected 1e-06"),
        (
            {"learner": {"megatron": {"moe_grouped_gemm": True}}},
            "learner.megatron is unknown there, expected {}; learner.megatron.moe_grouped_gemm is",
        ),
        ({"algo": {"surrogate": {"clip_high": 0.3}}}, "algo.surrogate is unknown there"),
        ({"checkpoint": {"every_steps": 3}}, "checkpoint.every_steps is 3 there, expected 0"),
        ({"run": {"seed": 7}}, "run.seed is 7 there, expected 0"),
        (
            {"weightbus": {"digests": "blake2b"}},
            "weightbus.digests is blake2b there, expected xxh3",
        ),
        ({"weightbus": {"bulk": "plain"}}, "weightbus.digests is keyed there, expected xxh3"),
        ({"weightbus": {"bucket_bytes": 9}}, "weightbus.bucket_bytes is 9 there, expected 67108"),
        ({"weightbus": {"parts": "off"}}, 'weightbus.parts is "off" there, expected "auto"'),
    ]:
        ours, theirs = facts(settings_of(tmp_path)), facts(settings_of(tmp_path, **sections))
        assert difference(ours, theirs).startswith(why)
        assert difference(theirs, ours)


def test_another_model_is_noticed_by_its_config_and_by_its_weights(tmp_path: Path):
    ours = facts(settings_of(tmp_path / "a"))
    theirs = settings_of(tmp_path / "b")
    weights = theirs.model / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert difference(ours, facts(theirs)).startswith("weights in run.model is ")
    (theirs.model / "config.json").write_text('{"hidden_size": 1}')
    assert difference(ours, facts(theirs)).startswith("config.json in run.model is ")


def test_another_release_of_a_library_comes_first_and_another_build_does_not_matter(tmp_path: Path):
    ours = facts(settings_of(tmp_path))
    assert "+" not in ours["torch"]
    theirs = ours | {"megatron-core": "0.1", "learner.lr": "9"}
    found = difference(ours, theirs)
    assert found == (
        f"megatron-core is 0.1 there, expected {ours['megatron-core']}; "
        "learner.lr is 9 there, expected 1e-06"
    )


def test_a_password_of_a_teacher_is_not_sent(tmp_path: Path):
    settings = settings_of(tmp_path)
    algo = msgspec.structs.replace(settings.algo, teacher={"endpoint": "https://me:secret@host"})
    shown = facts(msgspec.structs.replace(settings, algo=algo))
    assert not [value for value in shown.values() if "secret" in value]
    assert difference(facts(settings), shown).startswith("[algo.teacher] is ")
