"""Print the log-probabilities that transformers gives each next token.

Usage: transformers_logprobs MODEL_FOLDER [FILE with a JSON list of token sequences]
"""

import json
import sys
from pathlib import Path

import torch

from tests.support.tiny_models import sequences


def main(folder: str, file: str | None = None) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    given = json.loads(Path(file).read_text()) if file is not None else sequences()
    with torch.no_grad():
        for sequence in given:
            token_ids = torch.tensor([sequence])
            logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
            answers.append(logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1).tolist())
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
