"""The tables of docs/coming_from_verl.md, generated from what `slipstream import-verl` applies.

Run as a program, this writes them into the page:

    python -m docs.generate.verl --write
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tomli_w

from docs.generate.page_parts import generated
from slipstream.deploy.interop.verl.hydra import after_program, overrides_of
from slipstream.deploy.interop.verl.keys import ACTOR, VerlKeys
from slipstream.deploy.interop.verl.rows import KeyRow
from slipstream.deploy.interop.verl.table import REMARKS_ON_VALUES, TOPICS
from slipstream.deploy.interop.verl.topics.algorithm import ADVANTAGES
from slipstream.deploy.interop.verl.topics.loss import ESTIMATORS, SURROGATES, surrogate
from slipstream.deploy.interop.verl.translate import translate

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_verl.md"
_HEAD = "| verl | Slipstream | Remark |\n|---|---|---|\n"
EXAMPLE = r"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet \
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen2.5-1.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=8 \
    custom_reward_function.path=gsm8k.py trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""


def keys() -> str:
    """Return the tables of all keys."""
    return "\n".join(
        f"### {topic.title}\n\n{_HEAD}" + "".join(_row(row) for row in topic.rows)
        for topic in TOPICS
    )


def _row(row: KeyRow) -> str:
    ours = "<br>".join(f"`{_short(name)}`" for name in row.ours) or "-"
    return f"| {_names(row.verl)} | {ours} | {row.remark.replace('|', chr(92) + '|')} |\n"


def _short(setting: str) -> str:
    """Return a setting as the page has it: a part that is one name is written as its name."""
    is_part = setting in {"algo.advantage.name", "algo.surrogate.name"}
    return setting.removesuffix(".name") if is_part else setting.replace("*", "NAME")


def _names(names: tuple[str, ...]) -> str:
    """Return keys as the page has them: of those with one parent the first is whole."""
    shown: list[str] = []
    parent = ""
    for name in names:
        above, _, last = name.rpartition(".")
        shown.append(f"`{last if above and above == parent else name}`")
        parent = above
    return ", ".join(shown)


def values() -> str:
    """Return the table of values that are names of algorithms."""
    parts: list[tuple[str, Mapping[str, object], Callable[[str], Mapping[str, object]]]] = [
        ("adv_estimator", ADVANTAGES, lambda name: ADVANTAGES[name]),
        ("loss_mode", SURROGATES, _surrogate),
        ("kl_loss_type", ESTIMATORS, lambda name: {"algo.kl.name": ESTIMATORS[name]}),
    ]
    lines = [line for key, names, settings in parts for line in _values(key, names, settings)]
    lines.append("| `adv_estimator=remax` | - | no role generates greedy answers for training |\n")
    return _HEAD + "".join(lines)


def _values(
    key: str, names: Mapping[str, object], settings_of: Callable[[str], Mapping[str, object]]
) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for name in names:
        text = "<br>".join(
            f"`{tomli_w.dumps({'v': value}).strip().replace('v', _short(setting), 1)}`"
            for setting, value in settings_of(name).items()
        )
        alike.setdefault(f"{text} | {REMARKS_ON_VALUES.get(name, '')}", []).append(name)
    for cells, same in alike.items():
        yield f"| {', '.join(f'`{key}={name}`' for name in same)} | {cells} |\n"


def _surrogate(name: str) -> Mapping[str, object]:
    found = surrogate(name, VerlKeys({f"{ACTOR}.policy_loss.dro_beta": 0.1})).settings
    return {key: value for key, value in found.items() if key != "algo.kl.coefficient"}


def example() -> str:
    """Return a command, and the file that it becomes."""
    found = translate(overrides_of(after_program(EXAMPLE.replace("\\\n", " ").split()) or []))
    return f"```\n{EXAMPLE}```\n\n```toml\n{tomli_w.dumps(found.table)}```\n"


PARTS: dict[str, Callable[[], str]] = {"keys": keys, "values": values, "example": example}


def main(arguments: list[str]) -> None:
    """Print the page, or write it."""
    page = generated(PAGE.read_text("utf-8"), PARTS)
    if "--write" in arguments:
        PAGE.write_text(page, "utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
