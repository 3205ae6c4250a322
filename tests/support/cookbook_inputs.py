"""What tinker-cookbook looks for by name, as small local folders: a model, two data sets."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.blank_model import write_blank_model
from tests.support.random_llama import make_qwen3, write_random_weights

MODEL = "Qwen/Qwen3-8B"  # a name that the recipes know a renderer for
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_ROWS = 240
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (  # as rl_loop begins its prompts
    {"role": "user", "content": f"How many r's are in strawberry?{SUFFIX}"},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w "
        "6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)
ANSWERS = ("1", "2")


def write_inputs(folder: Path) -> None:
    """Write a random tiny Qwen3, conversations that answer at random, and answered questions."""
    model = folder / MODEL
    vocabulary = {byte: number for number, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    size = len(vocabulary) + len(_SPECIALS)
    write_blank_model(model, hidden=128, layers=2, vocab_size=size)
    config = json.loads((model / "config.json").read_text())
    config |= {"max_position_embeddings": 2048, "eos_token_id": len(vocabulary) + 2}
    config |= {"bos_token_id": None, "pad_token_id": len(vocabulary)}
    (model / "config.json").write_text(json.dumps(config))
    write_random_weights(model, scale=0.15, seed=3)
    make_qwen3(model)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.save(str(model / "tokenizer.json"))
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    said = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    (model / "tokenizer_config.json").write_text(json.dumps(said))
    generation = {"eos_token_id": len(vocabulary) + 2, "pad_token_id": len(vocabulary)}
    (model / "generation_config.json").write_text(json.dumps(generation))
    answered = [
        {
            "messages": [
                *EXAMPLE,
                {"role": "user", "content": f"{number}?{SUFFIX}"},
                {"role": "assistant", "content": f"\\boxed{{{ANSWERS[number % 2]}}}"},
            ]
        }
        for number in range(_ROWS)
    ]
    _write_data(folder / "HuggingFaceH4" / "no_robots", "default", answered)
    asked = [
        {"question": f"{number}?", "answer": f"so #### {ANSWERS[number % 2]}"}
        for number in range(_ROWS)
    ]
    _write_data(folder / "openai" / "gsm8k", "main", asked)


def _write_data(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ("---", "configs:", f"- config_name: {name}", "  data_files:", "  - split: train")
    (folder / "README.md").write_text("\n".join((*lines, "    path: train.jsonl", "---", "")))
