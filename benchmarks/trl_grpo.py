"""TRL's GRPOTrainer on the inputs of run_measurement.py; prints ``step N`` after each step.

usage: python -m benchmarks.trl_grpo FOLDER JOB, as benchmarks.vs_trl starts it
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch


def main() -> int:
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    minimum, limit = job["limits"]
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
            generation_kwargs={"min_new_tokens": minimum} if minimum else None,
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
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Steps()],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
