"""Print the token ids that transformers gives conversations: MODEL_FOLDER, JSON on stdin."""

import json
import sys


def main(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    order = json.loads(sys.stdin.read())
    answers = [
        tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False, **order["kwargs"]
        )
        for turns in order["conversations"]
    ]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
