"""Prompts: their files, columns and lengths."""

import re
from functools import partial
from pathlib import PurePosixPath

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import Counterpart, Rule, Settings, Topic, nothing, refused

TOPIC = Topic("Data")
_data = TOPIC.below("data")


def _files(file: str, sources: str, limit: str) -> Rule:
    """Return the rule of one file or a list of them.

    Args:
        file: Setting of a single file.
        sources: Setting of the table of sources.
        limit: verl's key of the largest number of rows.
    """

    def rule(value: Value, keys: VerlKeys) -> Counterpart:
        names = [keys.path(name) for name in (value if isinstance(value, list) else [value])]
        max_rows = keys.integer(limit, default=-1)
        if len(names) == 1 and max_rows <= 0:
            return Counterpart({file: names[0]})
        settings: Settings = {}
        for source, name in zip(source_names(names), names, strict=True):
            settings[f"{sources}.{source}.file"] = name
            if max_rows > 0:
                settings[f"{sources}.{source}.max_rows"] = max_rows
        note = "the name of each source is that of its file, or of its folder"
        return Counterpart(settings, "renamed", note)

    return rule


def source_names(files: list[str]) -> list[str]:
    """Return a short name for each file, all different."""
    usual = {"train", "test", "val", "valid", "validation", "data"}
    names: list[str] = []
    for file in files:
        path = PurePosixPath(file)
        base = path.parent.name if path.stem in usual and path.parent.name else path.stem
        base = re.sub(r"[^A-Za-z0-9_-]+", "-", base).strip("-") or "source"
        taken = sum(name == base or name.startswith(f"{base}-") for name in names)
        names.append(f"{base}-{taken + 1}" if taken else base)
    return names


_data.rule(
    "train_files",
    "data.file data.sources.*.file data.sources.*.max_rows",
    "parquet or JSONL; several as sources, with weights if you want",
    kind="renamed",
)(_files("data.file", "data.sources", "data.train_max_samples"))
_data.rule("val_files", "eval.file eval.sets.*.file eval.sets.*.max_rows", kind="renamed")(
    _files("eval.file", "eval.sets", "data.val_max_samples")
)


@_data.rule(
    "train_max_samples val_max_samples",
    "data.sources.*.max_rows eval.sets.*.max_rows",
    "written with the files; the first rows, where verl may draw them",
)
def _most_rows(value: Value, _: VerlKeys) -> Counterpart:
    if isinstance(value, int) and value > 0:
        return Counterpart({}, "changed")
    return nothing("all rows, as by default")


_data.setting(
    "train_batch_size",
    "run.groups_per_step",
    rules.integer,
    "prompts per learner step",
    default=1024,
)
_data.dropped(
    "gen_batch_size val_batch_size", "prompts are issued as they are needed, not in batches"
)
_data.setting("max_prompt_length", "sampling.max_prompt_tokens", rules.integer)
_data.setting("max_response_length", "sampling.max_response_tokens", rules.integer)


@_data.rule(
    "filter_overlong_prompts",
    "sampling.overlong_prompts",
    "True is `drop`; a prompt is measured when it is asked, not before the run. One "
    "setting for this key and the next: where this is True, the next decides nothing",
)
def _filter_overlong(value: Value, _: VerlKeys) -> Counterpart:
    if value is not True:
        return nothing("data.truncation decides")
    note = "a prompt is measured when it is asked, not before the run"
    return Counterpart({"sampling.overlong_prompts": "drop"}, "changed", note)


@_data.rule(
    "truncation",
    "sampling.overlong_prompts",
    "`error` the same, `left` is `truncate`, which keeps the last tokens; `right` and "
    "`middle` have no counterpart and become `truncate`",
    kind="renamed",
)
def _truncation(value: Value, keys: VerlKeys) -> Counterpart:
    if keys.has_true("data.filter_overlong_prompts"):
        return nothing(
            "data.filter_overlong_prompts leaves longer prompts out, so it decides nothing"
        )
    if value == "error":
        return Counterpart({"sampling.overlong_prompts": "error"})
    truncated: Settings = {"sampling.overlong_prompts": "truncate"}
    if value == "left":
        return Counterpart(truncated)
    if value in ("right", "middle"):
        note = f"{value} keeps the first tokens, or both ends; truncate keeps the last ones"
        return Counterpart(truncated, "changed", note)
    return refused(f"{value!r} is none of error, left, right, middle")


_data.setting("prompt_key", "data.prompt_column", rules.text)
_data.setting("image_key", "data.image_column", rules.text)
_data.setting("shuffle", "data.shuffle", rules.switch)
_data.setting(
    "seed", "run.seed", partial(rules.integer, least=-(2**31)), "of sampling and learner as well"
)
_data.rule("apply_chat_template_kwargs.*", "sampling.chat_template_kwargs.*")(
    rules.below_table("sampling.chat_template_kwargs")
)
_data.left_to_write(
    "custom_cls.* sampler.* datagen.* cis.* continuous_token.*",
    "",
    "prompts come from files or reasoning-gym: write what your class makes into a file",
    "a class of one's own makes no prompts here",
    "data.file: write what your class makes into a JSONL or parquet file",
)
_data.rule("reward_fn_key", "", "the column is `data_source`", kind="dropped")(
    rules.just("data_source", "the column is data_source")
)
_data.dropped(
    "video_key audio_key image_patch_size return_multi_modal_inputs "
    "mm_processor_kwargs mm_processor_kwargs.**",
    "prompts have text and images, which are resized as the model's image processor says",
)
_data.dropped("tool_config_path function_tool_path", "tools are those of `environment.function`")
_data.dropped(
    "trust_remote_code use_shm tokenizer return_raw_chat return_raw_input_ids "
    "return_full_prompt dataloader_num_workers filter_overlong_prompts_workers "
    "validation_shuffle apply_chat_template_kwargs custom_cls sampler",
    "the broker reads rows itself, and needs no such switch",
)
