"""The quickstart's task and policy: two-digit addition for a policy of 0.8M parameters.

The policy ships with the project, in ``addition_policy``. ``make policy`` makes it again.
"""

import argparse
import fcntl
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from slipstream.wire.errors import ChildDiedError
from slipstream.wire.files.replace import replace_file, replacing_folder
from slipstream.wire.process.command_line import EXIT_INTERRUPTED, run_role
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.processes import bound_to_me

SHIPPED_POLICY = Path(__file__).with_name("addition_policy")

_log = logging.getLogger(__name__)
_SPECIALS = ("<pad>", "<bos>", "<eos>")
_CHARACTERS = "0123456789+-*=<> "
_HELD_OUT = 256
_WARM_ACCURACY = 0.28  # of sampled answers
_DEMONSTRATIONS = 4  # per problem


def prepare(folder: Path) -> None:
    """Put the problems and the shipped policy into ``folder``.

    Leaves ``train.jsonl``, ``held_out.jsonl`` and ``model/``. Each appears whole or not at all,
    and what is there with the right bytes is left alone.
    """
    with _locked(folder):
        _write_problems(folder)
        copy_folder(SHIPPED_POLICY, folder / "model")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder and keep another process from filling it at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for the time of a few small files
        yield
    finally:
        os.close(descriptor)


def copy_folder(source: Path, target: Path) -> None:
    """Make ``target`` hold the files of ``source`` and no others; do nothing if it does."""
    wanted = _files_in(source)
    if target.is_dir() and _files_in(target) == wanted:
        return
    with replacing_folder(target, durable=False) as unfinished:
        for name, content in wanted.items():
            (unfinished / name).write_bytes(content)


def _files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def make_policy(work: Path, out: Path) -> int:
    """Warm up a blank policy on imperfect demonstrations; return the exit code.

    Args:
        work: where the inputs and the progress are kept; a second call resumes from there.
        out: the folder of the policy, which appears whole.

    Raises:
        ChildDiedError: the warm-up failed.
    """
    blank, warm = work / "blank", work / "policy"
    with _locked(work):
        _write_problems(work)
        rng = random.Random(8)  # noqa: S311 not for secrets
        rows = [
            {"prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(_taught_sum(a, b, rng))}
            for a, b in _problems()[_HELD_OUT:]
            for _ in range(_DEMONSTRATIONS)
        ]
        _write_rows(work / "demonstrations.jsonl", rows)
        write_blank_model(blank)
    command = [sys.executable, "-m", "slipstream.learner.warmup.main", "--model", str(blank)]
    command += ["--demonstrations", str(work / "demonstrations.jsonl")]
    command += ["--data", str(work / "train.jsonl"), "--held-out", str(work / "held_out.jsonl")]
    command += ["--out", str(warm), "--target", str(_WARM_ACCURACY)]
    with subprocess.Popen(command, preexec_fn=bound_to_me()) as warm_up:  # noqa: S603 our own
        try:
            code = warm_up.wait()
        except KeyboardInterrupt:  # it got the signal too, and keeps its progress
            code = warm_up.wait()
    if code == EXIT_INTERRUPTED:
        return code
    if code != 0:
        raise ChildDiedError(
            f"the warm-up ended with code {code}: see its last lines. Its progress is in "
            f"{warm}.progress; the same call resumes from there"
        )
    copy_folder(warm, out)
    _log.info("wrote %s", out)
    return 0


def _problems() -> list[tuple[int, int]]:
    """Return 00+00 to 99+99 in their order; the first ones are held out."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random(7).shuffle(problems)  # noqa: S311 not for secrets
    return problems


def _write_problems(folder: Path) -> None:
    """Split the problems into held-out ones and the others."""
    problems = _problems()
    for name, part in (
        ("held_out", problems[:_HELD_OUT]),
        ("train", problems[_HELD_OUT:]),
    ):
        rows = [
            {"prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(a + b), "data_source": "addition"}
            for a, b in part
        ]
        _write_rows(folder / f"{name}.jsonl", rows)


def _taught_sum(a: int, b: int, rng: random.Random) -> int:
    """Return the answer of a teacher that is often two too high.

    He is mostly right while ``a`` is below 40 and mostly wrong above. A policy that imitates him
    answers nearly every problem rightly now and then, which is what reinforcement can amplify,
    and most of them wrongly when it takes its likeliest answer.
    """
    error_rate = 0.3 if a < 40 else 0.75
    return a + b + (2 if rng.random() < error_rate else 0)


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.is_file() and path.read_bytes() == content:
        return
    replace_file(path, content, durable=False)


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


def main() -> int:
    """Make the policy that ships with the project."""
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.deploy.examples.addition",
        description="Make the policy that the quickstart starts from; `make policy` calls this.",
        epilog="example:\n  python -m slipstream.deploy.examples.addition --out policy\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the policy goes"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(".cache/addition"),
        metavar="DIR",
        help="inputs and progress; a second call resumes from there (.cache/addition)",
    )
    arguments = parser.parse_args()
    start_logging("policy")
    return run_role(lambda: make_policy(arguments.work, arguments.out))


if __name__ == "__main__":
    raise SystemExit(main())
