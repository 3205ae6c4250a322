"""All prompts, through the readers of their rewards, and one of them through the chat template.

And one answer through the reward function.
"""

import asyncio
import dataclasses
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from slipstream.broker.config import RewardSection, private_paths
from slipstream.broker.data.prompts import load_prompts
from slipstream.broker.data.rows import odd_shape
from slipstream.broker.data.sources import load_source, local_data, training_sources
from slipstream.broker.images import with_files
from slipstream.broker.reward_worker.choice import is_missing, read_rows
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.cluster.host_program import PROGRESS
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Prompt, Score, Transcript
from slipstream.wire.settings.sections import EnvironmentSection, SamplingSection, model_folder

_TOLD_ROWS = 1000  # from one line about progress to the next
_ROWS = 64  # in which a prompt is looked for, where bad rows are skipped


def gives_all_rewards(environment: EnvironmentSection, reward: RewardSection) -> bool:
    """Return whether no reward function is called in a run."""
    return environment.is_named and not reward.workers and not reward.inline


def odd_shapes(prompts: Collection[Prompt]) -> list[str]:
    """Return what is odd about prompts that can be asked, with their number."""
    counts = Counter(map(odd_shape, prompts))
    return [f"{n:,} of {len(prompts):,} prompts {what}" for what, n in counts.items() if what]


def first_prompt(config: RunConfig, images: ImageFolder | None = None) -> Prompt:
    """Return the first prompt of a run's data; its images are kept in a folder, if one is named.

    Raises:
        ConfigError: there are no rows, or the first is not a prompt; the text names the setting.
    """
    data = local_data(config.broker.data, config.run)
    source = training_sources(data)[0]
    rows = min(source.table.max_rows or _ROWS, _ROWS if data.on_bad_row == "skip" else 1)
    few = msgspec.structs.replace(source.table, max_rows=rows)
    source = dataclasses.replace(source, table=few)
    is_tolerant = data.on_bad_row == "skip"
    return load_source(source, data, keep_going=is_tolerant, images=images).prompts[0]


def judge_prompt(num_tokens: int, sampling: SamplingSection) -> Fact:
    """Return whether a prompt of this many tokens is asked."""
    found = f"the first one has {num_tokens} tokens, sampling.max_prompt_tokens is "
    found += f"{sampling.max_prompt_tokens}"
    refused = num_tokens > sampling.max_prompt_tokens and sampling.overlong_prompts == "error"
    return (fail if refused else ok)("prompt", found, "sampling.max_prompt_tokens")


def judge_readings(config: RunConfig, prompts: Sequence[Prompt]) -> list[Fact]:
    """Return whether the rewards of a run can read its rows; environments may give them instead."""
    reward, environment = config.broker.reward, config.generators.environment
    if gives_all_rewards(environment, reward):
        return []
    try:
        readings = read_rows(reward, _counted(prompts))
    except ConfigError as error:  # a worker elsewhere may have what is missing here
        outcome = warn if is_missing(error) else fail
        return [outcome("data", f"no reward has read its rows here: {error}", "reward.function")]
    return [
        (fail if len(reading.unread) == reading.num_rows and not environment.is_named else warn)(
            "data", reading.found, "reward.function"
        )
        for reading in readings
    ]


def _counted(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Yield prompts, and report the number of the current one."""
    for number, prompt in enumerate(prompts):
        if number % _TOLD_ROWS == 0:
            what = f"looking at the data: row {number:,} of {len(prompts):,}"
            sys.stderr.write(f"{PROGRESS}{what}\n")
            sys.stderr.flush()
        yield prompt


def observe_data(config: RunConfig) -> list[Fact]:
    """Read all prompts and held-out problems of a run, as its broker does at the start."""
    setting = "data.file, data.sources, eval.file, eval.sets"
    try:
        loaded = load_prompts(config.broker)
    except ConfigError as error:
        return [fail("data", str(error))]
    counts, prompts = loaded.counts(), [*loaded.training.rows(), *loaded.held_out]
    trouble = [warn("data", shape) for shape in odd_shapes(prompts)]
    trouble += judge_readings(config, prompts)
    found = f"{counts['rows']:,} prompts, {counts['eval_problems']:,} held-out problems"
    if skipped := counts["rows_skipped"]:
        fact = warn("data", f"{found}; {skipped:,} rows are left out", "data.on_bad_row")
        return [fact, *trouble]
    return [ok("data", found, setting), *trouble]


def observe_prompt(config: RunConfig) -> list[Fact]:
    """Render the first prompt of a run as its generators do."""
    from slipstream.generators.text.codec import TextCodec  # tokenizers

    try:
        codec = TextCodec(model_folder(config.run), config.generators.sampling)
        tokens = codec.tokens(first_prompt(config))
    except ConfigError as error:
        return [fail("prompt", str(error))]
    return [judge_prompt(len(tokens), config.generators.sampling)]


def judge_score(score: Score) -> Fact:
    """Return whether the reward function could score an answer."""
    if score.reward is None:
        return fail("reward", f"{score.function}: {score.unavailable}", "reward.function")
    found = f"{score.function} gives {score.reward:g} to one answer"
    return ok("reward", found, "reward.function")


def observe_reward(config: RunConfig) -> list[Fact]:
    """Score one answer to the first prompt, the ground truth if it is text, as a worker does."""
    with TemporaryDirectory(prefix="slipstream-images-") as name:
        images = ImageFolder(Path(name))
        try:
            prompt = first_prompt(config, images)
        except ConfigError as error:  # the broker's host may be the only one with the data
            return [warn("reward", f"was not tried here: {error}", "data.file")]
        files = [images.file_of(image.digest) for image in prompt.images]
        try:
            return [judge_score(asyncio.run(_scored(config, prompt, files)))]
        except ConfigError as error:
            return [fail("reward", str(error), "reward.function")]


async def _scored(config: RunConfig, prompt: Prompt, files: Sequence[Path]) -> Score:
    hidden = [path for path in private_paths(config.table) if path.exists()]
    settings = msgspec.structs.replace(config.broker.reward, processes=1)
    truth = prompt.ground_truth
    answer = Transcript(
        prompt=prompt,
        response=truth if isinstance(truth, str) else "",
        num_response_tokens=1,
        finish_reason="stop",
    )
    pool = await RewardPool.start(settings, hide=hidden)
    try:
        item = ScoringItem(group_id=0, sibling=0, lease_id=0)
        (score,) = [score async for score in pool.score([(item, with_files(answer, files))])]
        return score
    finally:
        await pool.close()
