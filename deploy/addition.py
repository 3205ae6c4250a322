"""The quickstart's task and model: two-digit addition for a policy of 0.8M parameters."""

import json
import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from wire.errors import ChildDiedError
from wire.processes import bound_to_me

_log = logging.getLogger(__name__)
_SPECIALS = ("<pad>", "<bos>", "<eos>")
_CHARACTERS = "0123456789+-*=<> "
_HELD_OUT = 256
_WARM_ACCURACY = 0.22
_DEMONSTRATIONS = 4  # per problem


def prepare(folder: Path) -> None:
    """Make prompts, tokenizer and a warmed-up policy in ``folder``, once.

    Leaves ``train.jsonl``, ``held_out.jsonl`` and ``model/``.
    """
    if (folder / "model" / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _log.info("first run: making the task and a policy to start from in %s", folder)
    write_problems(folder)
    blank = folder / "blank"
    write_blank_model(blank)
    command = [sys.executable, "-m", "learner.warmup", "--model", str(blank)]
    command += ["--demonstrations", str(folder / "demonstrations.jsonl")]
    command += ["--data", str(folder / "train.jsonl"), "--out", str(folder / "model")]
    command += ["--target", str(_WARM_ACCURACY)]
    warm_up = subprocess.run(  # noqa: S603 our own program
        command, check=False, preexec_fn=bound_to_me()
    )
    code = warm_up.returncode
    if code != 0:
        shutil.rmtree(folder / "model", ignore_errors=True)
        raise ChildDiedError(f"the supervised warm-up ended with code {code}")
    shutil.rmtree(blank)


def write_problems(folder: Path) -> None:
    """Split all problems from 00+00 to 99+99 into held-out ones and the others."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random(7).shuffle(problems)  # noqa: S311 not for secrets
    for name, part in (
        ("held_out", problems[:_HELD_OUT]),
        ("train", problems[_HELD_OUT:]),
    ):
        rows = [
            {"prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(a + b), "data_source": "addition"}
            for a, b in part
        ]
        _write_rows(folder / f"{name}.jsonl", rows)
    rng = random.Random(8)  # noqa: S311 not for secrets
    demonstrations = [
        {"prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(_taught_sum(a, b, rng))}
        for a, b in problems[_HELD_OUT:]
        for _ in range(_DEMONSTRATIONS)
    ]
    _write_rows(folder / "demonstrations.jsonl", demonstrations)


def _taught_sum(a: int, b: int, rng: random.Random) -> int:
    """Return what a teacher says who is often two too high.

    He is mostly right while ``a`` is below 40 and mostly wrong above. A policy that imitates him
    answers nearly every problem rightly now and then, which is what reinforcement can amplify,
    and most of them wrongly when it takes its likeliest answer.
    """
    error_rate = 0.3 if a < 40 else 0.75
    return a + b + (2 if rng.random() < error_rate else 0)


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_blank_model(
    folder: Path, *, hidden: int = 128, layers: int = 4, vocab_size: int | None = None
) -> None:
    """Write the configuration and tokenizer of a small Llama without weights.

    A ``vocab_size`` above the tokenizer's pads the vocabulary with tokens that mean nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*_SPECIALS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size or len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **tokens},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
