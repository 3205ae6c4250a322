"""`slipstream replay --demonstrations`: supervised fine-tuning through the learner."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.integration.recorded import finish, rows, start_tool, weights
from tests.support.bus.remote import free_ports
from tests.support.chat_model import write_chat_policy
from tests.support.ranks.run import outputs, start
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
ROWS, PER_STEP, STEPS = 12, 4, 6
TP2 = ("learner.ranks=2", "learner.tensor_parallel=2")
DP2 = ("learner.ranks=2",)
TWO_NODES = (*DP2, "learner.ranks_per_node=1")


class Tuning:
    """A tiny model, demonstrations of sums in conversations of one and two turns, settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_chat_policy(folder / "model")
        self.file = folder / "sums.jsonl"
        self.conversations = [
            [
                turn
                for more in range(1 + number % 2)
                for turn in (
                    {"role": "user", "content": f"{number}+{more}?" + "x" * (number % 5)},
                    {"role": "assistant", "content": str(number + more)},
                )
            ]
            for number in range(ROWS)
        ]
        rows = [json.dumps({"messages": turns}) + "\n" for turns in self.conversations]
        self.file.write_text("".join(rows))
        self.config = folder / "run.toml"
        self.config.write_text(
            f"""
            [run]
            name = "a"
            dir = "{folder / "runs"}"
            model = "{self.model}"
            steps = {STEPS}
            group_size = 8
            groups_per_step = {PER_STEP}
            [algo]
            preset = "grpo"
            advantage.divide_by_std = false
            [learner]
            lr = 1e-2
            deterministic = true
            max_tokens_per_microbatch = 64
            timeout_s = {HANG_S}
            [checkpoint]
            export_at_end = true
            """
        )

    def tune(self, name: str, *words: str, code: int = 0) -> tuple[Path, str]:
        """Return the folder of a run and what the command printed."""
        command = [sys.executable, "-m", "tests.support.ranks.executed", "replay", *words]
        command += ["--demonstrations", str(self.file), "--config", str(self.config)]
        printed = finish(start_tool([*command, f"run.name={name}"]), code=code)
        return self.folder / "runs" / f"{name}-replay", printed

    def labelled(self) -> list[tuple[list[int], list[int]]]:
        """Return token ids and labels of each row, by the marks of ChatML."""
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        labelled = []
        for turns in self.conversations:
            ids, labels = list[int](), list[int]()
            for turn in turns:
                is_own = turn["role"] == "assistant"
                head = tokenizer.encode(f"<|im_start|>{turn['role']}\n").ids
                body = tokenizer.encode(f"{turn['content']}<|im_end|>").ids
                tail = tokenizer.encode("\n").ids
                ids += head + body + tail
                labels += [-100] * len(head) + (body if is_own else [-100] * len(body)) + [-100]
            labelled.append((ids[:-1], labels[:-1]))
        return labelled


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuning, Path, str]:
    """Six steps, two epochs, with a checkpoint after three."""
    tuning = Tuning(tmp_path_factory.mktemp("tuned"))
    return tuning, *tuning.tune("straight", "checkpoint.every_steps=3")


def losses(run: Path) -> list[float]:
    return [row["policy/loss"] for row in rows(run)]


def test_likelihood_rises_and_the_export_is_transformers(tuned: tuple[Tuning, Path, str]):
    tuning, run, printed = tuned
    assert f"{ROWS} demonstrations, 0 rows left out" in printed
    assert "6 steps of 4 (run.groups_per_step): 3 steps an epoch, 2 epochs" in printed
    assert re.search(r"step 6 loss \d\.\d{3} in", printed)
    found = losses(run)
    assert found[-1] < 0.5 * found[0]
    own = sum(label != -100 for _, labels in tuning.labelled() for label in labels)
    assert sum(row["tokens"] for row in rows(run)) == 2 * own
    file = tuning.folder / "rows.json"
    file.write_text(json.dumps(tuning.labelled()))
    out = tuning.folder / "gradient.safetensors"
    module = "integration.transformers_demonstrations"
    (after,) = outputs([start(tuning.folder, module, run / "model", file, out)])
    assert float(after) < 0.5 * found[0]


@pytest.mark.parametrize("layout", [(), DP2], ids=["one", "dp2"])
def test_loss_and_gradient_are_those_of_transformers(tmp_path: Path, layout: tuple[str, ...]):
    # Of a first update by Adam, lr = epsilon: new - old = -lr g / (|g| + lr)
    tuning, rate = Tuning(tmp_path), 10.0
    settings = (f"learner.lr={rate}", f"learner.adam_epsilon={rate}", "learner.clip_grad=0")
    whole = (f"run.groups_per_step={ROWS}", "run.steps=1")
    run, _ = tuning.tune("a", *settings, *whole, *layout)
    file, out = tmp_path / "rows.json", tmp_path / "gradient.safetensors"
    file.write_text(json.dumps(tuning.labelled()))
    module = "integration.transformers_demonstrations"
    (loss,) = outputs([start(tmp_path, module, tuning.model, file, out)])
    assert losses(run) == [pytest.approx(float(loss), rel=1e-6)]
    before, after = load_file(tuning.model / "model.safetensors"), weights(run)
    expected = load_file(out)
    assert expected.keys() == after.keys()
    for name, gradient in expected.items():
        change = before[name].double() - after[name].double()
        found = change * rate / (rate - change.abs())
        assert (found - gradient).abs().max() < 1e-6, name
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-2


def test_a_resumed_tuning_computes_the_bits_of_an_unstopped_one(tuned: tuple[Tuning, Path, str]):
    tuning, run, _ = tuned
    checkpoint = run / "checkpoints" / "step-000003"
    resumed, _ = tuning.tune("resumed", f"run.resume_from={checkpoint}")
    assert losses(resumed) == losses(run)[3:]
    expected = weights(run)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(resumed).items())


def test_two_nodes_train_what_one_of_them_read(tuned: tuple[Tuning, Path, str]):
    tuning, straight, _ = tuned
    run, printed = tuning.tune("two", *TWO_NODES)
    (line,) = [line for line in printed.splitlines() if line.startswith("start-learner ")]
    address = free_ports().removeprefix("tcp://")
    filled = line.replace("HOST:PORT", address)
    command = [sys.executable, "-m", "slipstream.learner.main", *shlex.split(filled)[1:]]
    assert command.count("K") == 1
    nodes = [start_tool([node if word == "K" else word for word in command]) for node in "01"]
    for node in nodes:
        finish(node)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-4)


def test_adapters_learn_on_two_ranks(tmp_path: Path):
    tuning = Tuning(tmp_path)
    run, _ = tuning.tune("a", *TP2, "lora.rank=4", "learner.lr=5e-2")
    assert losses(run)[-1] < 0.8 * losses(run)[0]
    assert weights(run).keys() == load_file(tuning.model / "model.safetensors").keys()


def test_dry_run_says_what_would_be_trained_and_a_bad_row_leaves_nothing_behind(tmp_path: Path):
    tuning = Tuning(tmp_path)
    _, printed = tuning.tune("a", "--dry-run", "run.epochs=1")
    assert "3 steps of 4 (run.groups_per_step): 3 steps an epoch, 1 epochs" in printed
    assert '"preset": "sft"' in printed
    with tuning.file.open("a") as file:
        file.write('{"messages": []}\n')
    _, printed = tuning.tune("a", code=2)
    assert f"row {ROWS} (line {ROWS + 1}) of {tuning.file}: messages has no turns" in printed
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    _, printed = tuning.tune("a", "some.trajectories", code=2)
    assert "takes some.trajectories or --demonstrations, got both" in printed
