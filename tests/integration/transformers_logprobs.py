"""Print the log-probabilities that transformers gives each next token: MODEL_FOLDER."""

import json
import sys

import torch

from generators.sglang_cpu import define_torchvision_operators
from tests.integration.tiny_models import sequences


def main(folder: str) -> None:
    define_torchvision_operators()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    with torch.no_grad():
        for sequence in sequences():
            token_ids = torch.tensor([sequence])
            logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
            answers.append(logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1).tolist())
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
