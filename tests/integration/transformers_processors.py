"""Print the tokens that transformers' processors give conversations: FILE of JSON, by model folder.

An order has "folders" and "conversations"; images of a conversation are files.
"""

import json
import sys
from pathlib import Path


def main(file: str) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    order = json.loads(Path(file).read_text())
    answers = {}
    for folder in order["folders"]:
        processor = AutoProcessor.from_pretrained(folder)
        answers[folder] = [
            processor(
                text=[
                    processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
                ],
                images=[Image.open(image) for image in files] or None,
            )["input_ids"][0]
            for turns, files in order["conversations"]
        ]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
