"""Train adapters by transformers, the real PEFT and torch's AdamW; print how far ours are from it.

Usage: peft_training MODEL FILE
FILE has a list of losses: name, options, data, our figures, and the folders of our versions: before
the first step and after each. What is printed has, for each, the largest differences of figures and
of adapters.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

LR, BETAS, EPSILON, CLIP = (
    1e-3,
    (0.9, 0.95),
    1e-2,
    1.0,
)  # no step of a gradient that is all rounding


def loss_of(
    name: str, logprobs: Tensor, given: dict[str, Tensor], options: dict[str, float]
) -> Tensor:
    """Return the sum of a loss as it is published, from formulas written down once more."""
    if name == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    ratio = torch.exp(logprobs - given["logprobs"])
    advantages = given["advantages"]
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    clipped = torch.clamp(ratio, low, high)
    match name:
        case "importance_sampling":
            objective = ratio * advantages
        case "ppo":
            objective = torch.min(ratio * advantages, clipped * advantages)
        case "cispo":
            objective = clipped.detach() * advantages * logprobs
        case _:
            apart = (logprobs - given["logprobs"]) ** 2
            objective = logprobs * advantages - options["beta"] * apart / 2
    return -objective.sum()


def main(folder: str, file: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    found = {}
    for case in json.loads(Path(file).read_text()):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        first, *later = case["versions"]
        model = PeftModel.from_pretrained(base, first, is_trainable=True)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            trained.values(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=0.0
        )
        of_figures, of_adapters, moved = 0.0, 0.0, 0.0
        for (total, logprobs), version in zip(case["figures"], later, strict=True):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for (tokens, inputs), ours in zip(case["data"], logprobs, strict=True):
                logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
                targets = torch.tensor(inputs["target_tokens"])
                chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
                difference = (chosen - torch.tensor(ours)).abs().max()
                of_figures = max(of_figures, float(difference))
                given = {name: torch.tensor(values) for name, values in inputs.items()}
                loss = loss + loss_of(case["name"], chosen, given, case["options"])
            of_figures = max(of_figures, abs(float(loss) - total) / max(1.0, abs(total)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
            optimizer.step()
            ours_now = load_file(Path(version) / "adapter_model.safetensors")
            before = load_file(Path(first) / "adapter_model.safetensors")
            for name, parameter in trained.items():
                known = name.replace(".default", "")
                of_adapters = max(of_adapters, float((ours_now[known] - parameter).abs().max()))
                moved = max(moved, float((parameter - before[known]).abs().max()))
        found[case["name"]] = {"figures": of_figures, "adapters": of_adapters, "moved": moved}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
