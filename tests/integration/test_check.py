"""`slipstream check`: each planted fault is named with its setting, and a sound run has none."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
from safetensors.torch import load_file, save_file

from slipstream.broker.server.keyring import make_client_key
from slipstream.broker.store.server_binary import find_server
from slipstream.deploy.preflight.check.facts import Fact, HostReport, exit_code
from slipstream.wire.files.run_folder import TRAIL
from slipstream.wire.process.command_line import EXIT_INTERRUPTED
from tests.e2e.hosts import toml_of
from tests.support.commands import called
from tests.support.slow_disk import passed_over
from tests.support.tiny_run import ROOT, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.integration]
Plant = Callable[[Path, ExitStack], dict[str, object]]  # returns settings


@dataclass
class Checked:
    """What the command printed."""

    code: int
    reports: list[HostReport]

    @property
    def facts(self) -> list[Fact]:
        return [fact for report in self.reports for fact in report.facts]

    @property
    def trouble(self) -> list[str]:
        return [fact.line for fact in self.facts if fact.outcome != "ok"]


def words_of(folder: Path, settings: dict[str, object], *words: str) -> list[str]:
    (folder / "run.toml").write_text(toml_of(tiny_settings(folder) | settings))
    return ["check", "--config", str(folder / "run.toml"), *words]


def command_of(folder: Path, settings: dict[str, object], *words: str) -> list[str]:
    """Return a check whose process is the subject."""
    module = "slipstream.deploy.main"
    return [sys.executable, "-m", module, *words_of(folder, settings, *words)]


def checked(folder: Path, settings: dict[str, object], *words: str) -> Checked:
    return facts_of(called(*words_of(folder, settings, "--json", *words)))


def facts_of(done: "subprocess.CompletedProcess[str]") -> Checked:
    assert done.stdout, done.stderr
    printed = json.loads(done.stdout)
    assert printed["exit_code"] == done.returncode
    reports = passed_over(msgspec.convert(printed["hosts"], list[HostReport]))
    return Checked(exit_code(reports), reports)


def ended(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the inputs of a run."""
    folder = tmp_path / "a b"
    folder.mkdir()
    tiny_inputs(folder)
    return folder


# ---- what is planted -------------------------------------------------------------


def name_taken(folder: Path, _stack: ExitStack) -> dict[str, object]:
    (folder / "runs" / "tiny" / TRAIL).mkdir(parents=True)
    return {}


def port_taken(_folder: Path, stack: ExitStack) -> dict[str, object]:
    taken = stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return {"broker.dashboard.port": taken.getsockname()[1]}


def address_of_no_interface(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"broker.listen": "tcp://203.0.113.7:0"}


def key_of_wrong_role(folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"run.key_file": make_client_key(folder / "runs" / "keys", "page", "observer")}


def revoked_key(folder: Path, _stack: ExitStack) -> dict[str, object]:
    key = make_client_key(folder / "runs" / "keys", "far", "generator")
    (folder / "runs" / "keys" / "authorized" / "far.toml").unlink()
    return {"run.key_file": key}


def loose_key(folder: Path, _stack: ExitStack) -> dict[str, object]:
    key = make_client_key(folder / "runs" / "keys", "far", "generator")
    key.chmod(0o644)
    return {"run.key_file": key}


@contextmanager
def redis_with(folder: Path, *words: str) -> Iterator[str]:
    """Yield the URL of a server of its own that was started with some settings."""
    path = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--dir", ".", *words]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen([find_server(), *options], cwd=folder, stdout=log)
    try:
        until(path.exists, lambda: (folder / "redis.log").read_text())
        yield f"unix://{path}"
    finally:
        server.kill()
        server.wait()


def evicting_redis(folder: Path, stack: ExitStack) -> dict[str, object]:
    words = ["--appendonly", "yes", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]
    return {"broker.redis.url": stack.enter_context(redis_with(folder, *words))}


def forgetful_redis(folder: Path, stack: ExitStack) -> dict[str, object]:
    return {"broker.redis.url": stack.enter_context(redis_with(folder, "--appendonly", "no"))}


def no_redis(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"broker.redis.url": "redis://127.0.0.1:1"}


def missing_tokenizer(folder: Path, _stack: ExitStack) -> dict[str, object]:
    (folder / "model" / "tokenizer.json").unlink()
    return {}


def missing_weights(folder: Path, _stack: ExitStack) -> dict[str, object]:
    (folder / "model" / "model.safetensors").unlink()
    return {}


def weights_cut_off(folder: Path, _stack: ExitStack) -> dict[str, object]:
    weights = folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # others may have a link to it
    weights.write_bytes(content[: len(content) // 2])
    return {}


def another_output_layer(folder: Path, _stack: ExitStack) -> dict[str, object]:
    weights = folder / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    weights.unlink()  # others may have a link to it
    save_file(tensors, weights)
    return {}


def broken_template(folder: Path, _stack: ExitStack) -> dict[str, object]:
    template = folder / "chat.jinja"
    template.write_text("{{ messages[0].content.no_such_filter() }}")
    return {"data.as_chat": True, "sampling.chat_template": template}


def wrong_column(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"data.prompt_column": "question"}


def missing_held_out(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"eval.file": "none.jsonl"}


def broken_row(folder: Path, _stack: ExitStack) -> dict[str, object]:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": 1\n')
    return {}


def row_without_truth(folder: Path, _stack: ExitStack) -> dict[str, object]:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2"}\n')
    return {"reward.function": "slipstream.broker.rewards.exact_match:score"}


def raising_reward(folder: Path, _stack: ExitStack) -> dict[str, object]:
    text = "def score(*_, **__):\n    raise ValueError('no ground truth')\n"
    (folder / "reward.py").write_text(text)
    return {}


def too_little_memory(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"generators.max_cached_tokens": 10**12}


def too_little_disk(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"checkpoint.every_steps": 1, "checkpoint.keep_last": 10**8}


def address_for_weights(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"weightbus.host": "203.0.113.7", "weightbus.transport": "collective"}


def unknown_to_libraries(folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {
        "learner.megatron.hidden_dropuot": 0.1,
        "generators.sglang.mem_fracton_static": 0.5,
        "logging.trackers": ["tensorboard", "swanlab"],
        "environment.function": f"{folder / 'game.py'}:Game",
    }


def misspelled_role(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"deploy.cores.generater": [0]}


def misspelled_setting(_folder: Path, _stack: ExitStack) -> dict[str, object]:
    return {"run.stepz": 3}


# exit code, then beginnings of the lines that are not ok, and what each must hold.
FAULTS: dict[Plant, tuple[int, list[tuple[str, str]]]] = {
    name_taken: (1, [("warn run folder: ", "a new run would be tiny-2; --resume auto (run.name)")]),
    port_taken: (2, [("fail dashboard: ", "another process listens broker.dashboard.port")]),
    address_of_no_interface: (
        2,
        [
            ("fail broker.listen: 203.0.113.7", "no address of this host; it has lo 127.0.0.1"),
            ("warn broker keys: ", "slipstream keys make (broker.keys)"),
        ],
    ),
    key_of_wrong_role: (2, [("fail key file: ", "of the role observer, expected (run.key_file)")]),
    revoked_key: (2, [("fail key file: far is unknown to the broker", "(run.key_file)")]),
    loose_key: (2, [("fail key file: ", "mode 0644 (run.key_file)")]),
    evicting_redis: (
        2,
        [("fail Redis persistence: ", "allkeys-lru, expected noeviction (broker.redis.url)")],
    ),
    forgetful_redis: (
        2,
        [("fail Redis persistence: ", "appendonly is no, expected yes (broker.redis.url)")],
    ),
    no_redis: (2, [("fail Redis: ", "redis://127.0.0.1:1 (broker.redis.url)")]),
    missing_tokenizer: (
        2,
        [
            ("fail prompt: no tokenizer.json", "(run.model)"),
            ("fail tokenizer: no tokenizer.json", "(run.model)"),
        ],
    ),
    missing_weights: (2, [("fail model: ", "model.safetensors (run.model)")]),
    weights_cut_off: (2, [("fail model: ", "no whole weight file (run.model)")]),
    another_output_layer: (2, [("fail model: ", "lm_head.weight tie_word_embeddings (run.model)")]),
    broken_template: (2, [("fail prompt: ", "no_such_filter (sampling.chat_template)")]),
    wrong_column: (2, [("fail data: ", "data.prompt_column question train.jsonl")]),
    missing_held_out: (2, [("fail data: ", "eval.file none.jsonl")]),
    broken_row: (2, [("fail data: ", "data.file train.jsonl")]),
    row_without_truth: (
        1,
        [
            (
                "warn data: 1 of 41 rows: no ground truth that exact_match:score reads, row 40: ",
                "(data.ground_truth_column) (reward.function)",
            )
        ],
    ),
    raising_reward: (2, [("fail reward: ", "no ground truth (reward.function)")]),
    too_little_memory: (2, [("fail memory: ", "caches generators.max_cached_tokens")]),
    too_little_disk: (2, [("fail disk space: ", "checkpoints checkpoint.keep_last)")]),
    address_for_weights: (
        2,
        [("fail weightbus.host: 203.0.113.7", "no address of this host (weightbus.host)")],
    ),
    unknown_to_libraries: (
        2,
        [
            ("fail trackers: not installed: swanlab", "(logging.trackers)"),
            ("fail megatron: unknown setting", "learner.megatron.hidden_dropuot did you mean"),
            ("fail sglang: generators.sglang.mem_fracton_static", "is not a setting"),
            ("fail environment: ", "game.py (environment.function)"),
        ],
    ),
    misspelled_role: (1, [("warn roles: there is no generater (deploy.cores)", "broker")]),
    misspelled_setting: (2, [("fail settings: ", "run.stepz; did you mean steps?")]),
}


# Faults that stand beside each other: none keeps the check from looking at another's subject.
TOGETHER: list[tuple[Plant, ...]] = [
    (name_taken, port_taken, loose_key, no_redis, wrong_column, address_for_weights),
    (address_of_no_interface, evicting_redis, broken_row, too_little_disk),
    (revoked_key, forgetful_redis, missing_held_out, too_little_memory, missing_weights),
    (missing_tokenizer, misspelled_role, key_of_wrong_role),
    (another_output_layer, row_without_truth),
    (weights_cut_off, broken_template, raising_reward),
    (unknown_to_libraries,),
    (misspelled_setting,),
]


def test_every_fault_is_planted_once():
    assert sorted(map(id, FAULTS)) == sorted(id(plant) for plants in TOGETHER for plant in plants)


@pytest.mark.parametrize("plants", TOGETHER, ids=lambda plants: plants[0].__name__)
def test_planted_faults_are_each_named_with_their_setting(folder: Path, plants: tuple[Plant, ...]):
    settings: dict[str, object] = {}
    with ExitStack() as stack:
        for plant in plants:
            settings |= plant(folder, stack)
        found = checked(folder, settings)
    expected = [line for plant in plants for line in FAULTS[plant][1]]
    assert found.code == max(FAULTS[plant][0] for plant in plants)
    assert len(found.trouble) == len(expected), "\n".join(found.trouble)
    for start, words in expected:
        (line,) = [line for line in found.trouble if line.startswith(start)]
        missing = [word for word in words.split() if word not in line]
        assert not missing, f"{missing} of {line}"


def files_in(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


def test_a_sound_run_has_no_fault_and_nothing_is_left(folder: Path):
    before = files_in(folder)
    found = checked(folder, {"weightbus.transport": "collective"})
    assert (found.code, found.trouble) == (0, [])
    assert files_in(folder) - before == {folder / "run.toml"}
    names = {fact.name for fact in found.facts}
    assert names == {
        *("settings", "run folder", "roles", "dashboard", "weightbus.host", "interface"),
        *("memory", "shared memory", "GPUs", "libraries", "flash-attn", "fsync", "disk space"),
        *("Redis", "trackers", "data", "prompt", "reward", "model", "clock"),
    }


def test_too_few_gpus_fail_and_the_rest_is_looked_at_all_the_same(folder: Path):
    settings = {"deploy.gpus_per_host": 1, "generators.device": "cuda", "generators.count": 99}
    found = checked(folder, settings)
    assert found.code == 2
    lines = "\n".join(found.trouble)
    assert "fail places: this host has 1 GPUs; learner.ranks = 1 and generators.count = 99" in lines
    assert "are needed; NCCL " in lines
    assert {"reward", "prompt", "model"} <= {fact.name for fact in found.facts}


def test_a_host_that_meets_no_learner_ends_with_its_facts(folder: Path):
    make_client_key(folder / "keys", "b", "generator")
    settings: dict[str, object] = {
        "deploy.hosts": ["a", "b"],
        "learner.rendezvous_timeout_s": 1,
        "run.key_file": str(folder / "keys" / "clients" / "b.key"),
    }
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        where = ("--json", "--on", "hosts", "--node", "1", "--rendezvous", at)
        found = facts_of(ended(command_of(folder, settings, *where)))
    assert found.code == 2
    (line,) = found.trouble
    node = f"node 1 (host {socket.gethostname()})"
    assert line.startswith(f"fail hosts: {node} does not reach node 0 at {at} (--rendezvous)")


def test_ctrl_c_leaves_nothing(folder: Path):
    """In the middle of a reward that never ends."""
    began = folder / "began"
    text = f"import pathlib, time\ndef score(*_, **__):\n    pathlib.Path({str(began)!r}).touch()\n"
    (folder / "reward.py").write_text(f"{text}    time.sleep({HANG_S})\n")
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        command_of(folder, {"reward.timeout_s": HANG_S}),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},  # noqa: TID251 handed on
    )
    until(began.exists, "call of the reward function")
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == EXIT_INTERRUPTED
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive
    assert not list(temporary.iterdir())
    assert not (folder / "runs").exists()


# ---- slipstream run --dry-run ----------------------------------------------------


def test_a_dry_run_of_a_sound_run_says_so_and_leaves_nothing(folder: Path):
    before = files_in(folder)
    adapters = {"lora.rank": 2, "lora.targets": ["up_proj"]}
    _, *words = words_of(folder, {"generators.count": 3, **adapters}, "--dry-run")
    found = called("run", *words)
    assert found.returncode == 0, found.stdout + found.stderr
    said = "lora.publish: merged, because lora.targets names up_proj without gate_proj"
    assert said in found.stdout
    assert said in called("check", *words[:-1]).stdout
    assert "generator-0 to generator-2" in found.stdout
    assert " 0 fail" in found.stdout
    assert files_in(folder) - before == {folder / "run.toml"}


def test_a_dry_run_fails_where_the_run_would(folder: Path):
    with ExitStack() as stack:
        settings = raising_reward(folder, stack) | port_taken(folder, stack)
        _, *words = words_of(folder, settings, "--dry-run")
        found = called("run", *words)
    assert found.returncode == 1, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line.startswith("fail ")]
    expected = FAULTS[port_taken][1] + FAULTS[raising_reward][1]
    assert len(lines) == len(expected), lines
    for start, words in expected:
        (line,) = [line for line in lines if line.startswith(start)]
        assert all(word in line for word in words.split()), line
