"""TRL's GRPOTrainer on the inputs of run_measurement.py; prints ``step N`` after each step.

usage: python -m benchmarks.trl_grpo FOLDER JOB, as benchmarks.vs_trl starts it
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.broker.rewards.loading import load_function
from slipstream.broker.rewards.outcomes import outcome_of
from slipstream.wire.messages.trajectory import Json, Prompt, Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HELD_OUT_BATCH = 64
_PAGE = 64  # tokens of a page of the cache of continuous batching


def read_rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def greedy_answers(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: list[dict[str, str]],
    limit: int,
) -> list[str]:
    """Return an answer of at most ``limit`` tokens to each row's prompt."""
    texts: list[str] = []
    model.eval()
    for first in range(0, len(rows), _HELD_OUT_BATCH):
        prompts = [row["prompt"] for row in rows[first : first + _HELD_OUT_BATCH]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=limit,
        )
        texts += tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    model.train()
    return texts


def scorer(
    function: str, options: Mapping[str, Json]
) -> Callable[[Sequence[str], Sequence[Json]], list[float]]:
    """Return a reward of ours as a function of answers and their truths, all that it may read.

    Args:
        function: MODULE:NAME or FILE.py:NAME, as ``reward.function``.
        options: Options of the function, ``reward.options``.
    """
    reward = load_function(function, options)

    def score(answers: Sequence[str], truths: Sequence[Json]) -> list[float]:
        scores = []
        for answer, truth in zip(answers, truths, strict=True):
            prompt = Prompt(prompt="", ground_truth=truth)
            transcript = Transcript(
                prompt=prompt, response=answer, num_response_tokens=1, finish_reason="stop"
            )
            outcome = outcome_of(reward.call([transcript]))
            if outcome.reward is None:
                raise ValueError(f"{function} gave {answer!r} no reward: {outcome.unavailable}")
            scores.append(outcome.reward)
        return scores

    return score


def _cache(job: dict[str, Any]) -> dict[str, int]:
    """Return a cache in which all answers fit: what transformers looks for is a GPU's memory."""
    pages = job["samples"] * -(-(job["limits"][1] + job["prompt_tokens"]) // _PAGE)
    return {"page_size": _PAGE, "num_blocks": pages, "max_batch_tokens": 1024}


def _settings(job: dict[str, Any], folder: Path, end: int) -> dict[str, Any]:
    """Return the settings of GRPOConfig; ``end`` is the token that ends an answer."""
    fixed = job["limits"][0] == job["limits"][1]  # continuous batching knows no min_new_tokens
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": job["autocast"],
        "max_steps": job["steps"],
        "seed": job["seed"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": job["microbatch"],
        "gradient_accumulation_steps": job["samples"] // job["microbatch"],
        "num_generations": job["group_size"],
        "max_completion_length": job["limits"][1],
        "generation_kwargs": {"suppress_tokens": [end]} if fixed else None,
        "use_transformers_continuous_batching": job["continuous"],
        "transformers_continuous_batching_config": _cache(job) if job["continuous"] else None,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def main() -> int:
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    limit = job["limits"][1]
    sys.path.extend([job["path"]] if job["path"] else [])
    torch.set_num_threads(job["threads"])
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from trl import GRPOConfig, GRPOTrainer

    scores_of = scorer(job["reward"]["function"], job["reward"].get("options", {}))

    def score(completions: list[str], ground_truth: list[str], **_columns: object) -> list[float]:
        return scores_of(completions, ground_truth)

    spent = np.zeros(2)  # wall and CPU seconds of evaluations

    def evaluate(step: int) -> None:
        """Print the mean score of greedy answers, and what all evaluations took."""
        if job["evaluate_every"] and step % job["evaluate_every"] == 0:
            began = np.array([time.monotonic(), time.process_time()])
            held_out = read_rows(folder / "held_out.jsonl")
            texts = greedy_answers(model, tokenizer, held_out, limit)
            scores = scores_of(texts, [row["ground_truth"] for row in held_out])
            spent[:] += np.array([time.monotonic(), time.process_time()]) - began
            mean = sum(scores) / len(scores)
            print(f"scored {step} {mean} {spent[0]} {spent[1]}", flush=True)

    class Steps(TrainerCallback):
        def on_step_end(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **kwargs: object,
        ) -> None:
            print(f"step {state.global_step}", flush=True)
            evaluate(state.global_step)

    rows = [
        {name: row[name] for name in ("prompt", "ground_truth")}
        for row in read_rows(folder / "train.jsonl")
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=job["dtype"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=GRPOConfig(**_settings(job, folder, tokenizer.eos_token_id)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    evaluate(0)
    trainer.train()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
