"""TRL's GRPOTrainer on the inputs of run_measurement.py; prints ``step N`` after each step.

usage: python -m benchmarks.trl_grpo FOLDER JOB, as benchmarks.vs_trl starts it
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

_PAGE = 64  # tokens of a page of the cache of continuous batching


def _cache(job: dict[str, Any]) -> dict[str, int]:
    """Return a cache in which all answers fit: what transformers looks for is a GPU's memory."""
    pages = job["samples"] * -(-(job["limits"][1] + job["prompt_tokens"]) // _PAGE)
    return {"page_size": _PAGE, "num_blocks": pages, "max_batch_tokens": 1024}


def main() -> int:
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    minimum, limit = job["limits"]
    fixed = minimum == limit  # continuous batching knows no min_new_tokens
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

    spec = importlib.util.spec_from_file_location("reward", folder / "reward.py")
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)

    def score(completions: list[str], **_columns: object) -> list[float]:
        return [reward.score("", text, "", {}) for text in completions]

    class Steps(TrainerCallback):
        def on_step_end(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **kwargs: object,
        ) -> None:
            print(f"step {state.global_step}", flush=True)

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=job["dtype"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            max_steps=job["steps"],
            learning_rate=0.0,
            per_device_train_batch_size=job["microbatch"],
            gradient_accumulation_steps=job["samples"] // job["microbatch"],
            num_generations=8,
            max_completion_length=limit,
            generation_kwargs={"suppress_tokens": [tokenizer.eos_token_id]} if fixed else None,
            use_transformers_continuous_batching=job["continuous"],
            transformers_continuous_batching_config=_cache(job) if job["continuous"] else None,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
