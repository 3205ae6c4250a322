from pathlib import Path

import pytest

from slipstream.broker.config import BrokerSection, broker_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import load_table, section, to_table
from slipstream.wire.settings.sections import RunSection, SamplingSection, required, run_section


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "first"\nsteps = 7\n\n[broker.redis]\nfsync = "no"\n')
    return path


def test_a_file_and_its_overrides_become_a_section(run_file: Path):
    table = load_table(run_file, ["run.steps=9", "run.model=models/tiny", "run.seed = 3"])
    run = run_section(table)
    assert (run.name, run.steps, run.model, run.seed) == ("first", 9, "models/tiny", 3)
    assert run.group_size == RunSection().group_size


def test_an_override_reaches_a_nested_table_and_keeps_its_other_settings(run_file: Path):
    table = load_table(run_file, ["broker.redis.url=redis://localhost:6379", "broker.lease_s=2.5"])
    broker = section(table, "broker", BrokerSection)
    assert broker.redis.url == "redis://localhost:6379"
    assert broker.redis.fsync == "no"
    assert broker.lease_s == 2.5


@pytest.mark.parametrize(
    ("override", "value"),
    [("run.name=on", "on"), ('run.name="true"', "true"), ("run.name=a=b", "a=b")],
)
def test_what_is_not_toml_is_a_string(run_file: Path, override: str, value: str):
    assert run_section(load_table(run_file, [override])).name == value


MALFORMED = ("steps=3", "run.steps", "run.=3", ".steps=3", "=3")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        *((word, r"is not of the form section\.key=value") for word in MALFORMED),
        ("run.steps.more=3", "steps is not a section"),
        ("lerner.lr=1", r"unknown section \[lerner\].*did you mean learner\?"),
        ("trainer.test_freq=-1", r"\[trainer\].*slipstream import-verl"),
    ],
)
def test_an_override_of_no_setting_is_refused(run_file: Path, override: str, why: str):
    with pytest.raises(ConfigError, match=why):
        load_table(run_file, [override])


def test_a_section_that_is_a_value_is_refused(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("run = 3\n")
    with pytest.raises(ConfigError, match="run must be a section, got 3"):
        load_table(path)


def test_a_wrong_value_and_an_unknown_key_name_the_setting():
    for struct, values, names in [
        (RunSection, {"steps": 0}, r"run\.steps must be a whole number of at least 1, got 0"),
        (RunSection, {"max_staleness_steps": -1}, r"s_steps must be .* of at least 0, got -1"),
        (RunSection, {"group_sise": 3}, r"run\.group_sise; did you mean group_size\?"),
        (SamplingSection, {"zzz": 3}, r"known are chat_template, .*temperature"),
        (BrokerSection, {"redis": {"fsink": "no"}}, r"broker\.redis\.fsink; did you mean fsync\?"),
        (BrokerSection, {"redis": {"fsync": "x"}}, r"broker\.redis\.fsync must be one of"),
    ]:
        name = struct.__name__.removesuffix("Section").lower()
        with pytest.raises(ConfigError, match=names):
            section({name: values}, name, struct)


def test_a_setting_of_earlier_versions_is_refused_with_what_took_its_place():
    values = {"learner": {"overlap_grad_reduce": True}}
    with pytest.raises(
        ConfigError, match=r"learner\.overlap_grad_reduce is gone: .* do so; remove"
    ):
        section(values, "learner", RunSection)


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path: Path):
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"cannot read .*run\.toml: No such file"):
        load_table(path)
    for text in ("[run\n", f"[run]\nname = {'[' * 10_000}\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
            load_table(path)


def test_a_resolved_section_can_be_read_back():
    broker = section({"broker": {"max_attempts": 5}}, "broker", BrokerSection)
    plain = to_table(broker)
    assert "max_in_flight" not in plain
    assert section({"broker": plain}, "broker", BrokerSection) == broker


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", ".."])
def test_a_run_name_that_is_no_folder_name_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"run\.name must be a plain folder name"):
        run_section({"run": {"name": name}})


def test_a_socket_path_too_long_for_the_kernel_names_the_way_out(tmp_path: Path):
    deep = RunSection(dir=str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match=r"longer than 100 bytes; set run\.socket_dir"):
        deep.socket("broker")


def test_sockets_lie_in_a_private_folder(short_folder: Path):
    folder = short_folder / "sockets"
    folder.mkdir(mode=0o755)
    run = RunSection(socket_dir=str(folder))
    assert run.endpoint("broker") == f"ipc://{folder}/broker.sock"
    run.make_socket_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_resolving_a_socket_path_makes_no_folder(short_folder: Path):
    run = RunSection(dir=str(short_folder))
    run.endpoint("broker")
    assert list(short_folder.iterdir()) == []


def test_a_setting_without_default_is_named():
    assert required("x", "run.model") == "x"
    with pytest.raises(ConfigError, match=r"run\.model is not set"):
        required("", "run.model")


def test_a_learner_step_fits_under_the_high_water():
    """4 groups of 8 answers of 300 + 700 tokens, 13 bytes each."""
    table: dict[str, dict[str, object]] = {
        "data": {"file": "x"},
        "run": {"groups_per_step": 4, "group_size": 8},
        "sampling": {"max_prompt_tokens": 300, "max_response_tokens": 700},
    }
    enough = 4 * 8 * 1_000 * 13
    settings = broker_settings({**table, "broker": {"high_water_bytes": enough}})
    assert settings.broker.high_water_bytes == enough
    with pytest.raises(ConfigError, match=rf"high_water_bytes is {enough - 1}, .* {enough} bytes"):
        broker_settings({**table, "broker": {"high_water_bytes": enough - 1}})


def test_in_flight_is_limited_by_the_bound_unless_set_lower():
    table = {"data": {"file": "x"}, "run": {"max_staleness_steps": 2, "groups_per_step": 4}}
    assert broker_settings(table).max_in_flight == 12
    assert broker_settings({**table, "broker": {"max_in_flight": 5}}).max_in_flight == 5
