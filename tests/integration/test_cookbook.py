"""tinker-cookbook's sl_loop and rl_loop, unmodified, against a real server, learner and engine.

Their data sets' names are small local folders, and the model's name is one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.cookbook_inputs import MODEL, write_inputs
from tests.support.served_tenants import Served, serving
from tests.support.waiting import HANG_S

pytest.importorskip("tinker_cookbook")
pytestmark = [pytest.mark.integration, pytest.mark.slow]
SIZES = {"max_prompt_tokens": 1500, "max_response_tokens": 128}
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def run_recipe(served: Served, recipe: str, **options: object) -> list[dict[str, float]]:
    """Run a recipe to its end in the folder of its inputs; return its metrics by step."""
    words = [f"{name}={value}" for name, value in options.items()]
    environment = {**os.environ, **OFFLINE, "HOME": str(served.folder)}  # noqa: TID251 its own
    environment |= {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": served.key("alice")}
    module = f"tinker_cookbook.recipes.{recipe}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, f"model_name={MODEL}", *words],
        cwd=served.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:] + served.logs()
    lines = (served.folder / str(options["log_path"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_recipes_run_to_their_ends():
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        folder = Path(name)
        write_inputs(folder)
        settings = {"max_cached_tokens": 16384, "max_sequences": 8}
        with serving(
            folder,
            "server",
            "learner",
            "engine",
            model=MODEL,
            sampling=SIZES,
            generators=settings,
            lora={"rank": 32},
        ) as served:
            taught = run_recipe(
                served,
                "sl_loop",
                log_path="taught",
                batch_size=2,
                learning_rate=3e-3,
                lora_rank=32,
                save_every=0,
                train_on_what="last_assistant_message",
            )
            losses = [row["train_mean_nll"] for row in taught]
            assert len(losses) == 120
            assert losses[-1] < 0.3 < 3.0 < losses[0]
            # From the taught policy, whose answers are right now and then.
            trained = run_recipe(
                served,
                "rl_loop",
                log_path="taught",
                batch_size=1,
                group_size=8,
                learning_rate=1e-3,
                lora_rank=32,
                max_tokens=40,
                save_every=2,
                max_steps=124,
                loss_fn="importance_sampling",
            )[len(taught) :]
    rewards = [row["reward/total"] for row in trained]
    assert len(rewards) == 4
    assert any(0 < reward < 1 for reward in rewards), (rewards, losses[-9:])
    assert any("grad_norm" in row for row in trained), "a step was trained"
