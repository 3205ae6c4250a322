"""Print the token ids that transformers gives conversations: FILE of JSON, by model folder."""

import json
import sys
from pathlib import Path


def main(file: str) -> None:
    from transformers import AutoTokenizer

    order = json.loads(Path(file).read_text())
    answers = {}
    for folder, kwargs in order["kwargs"].items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answers[folder] = [
            tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
            )
            for turns in order["conversations"]
        ]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
