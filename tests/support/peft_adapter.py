"""Write a random adapter as the real PEFT does, and print the log-probabilities it gives.

Usage: peft_adapter MODEL_FOLDER ADAPTER_FOLDER LORA_CONFIG_JSON FILE
FILE is a JSON list of token sequences; what is printed has the log-probability of each next token.
"""

import json
import sys
from pathlib import Path

import torch


def main(folder: str, adapter: str, config: str, file: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **json.loads(config)))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(adapter)
    answers = []
    with torch.no_grad():
        for sequence in json.loads(Path(file).read_text()):
            token_ids = torch.tensor([sequence])
            logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
            answers.append(logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1).tolist())
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
