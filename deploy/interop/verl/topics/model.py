"""The policy's model and its low-rank adapters."""

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import ACTOR, MODEL, VerlKeys
from slipstream.deploy.interop.verl.rows import OFF, Counterpart, Rule, Topic, expected, nothing

TOPIC = Topic("Model and adapters")
_model = TOPIC.below(MODEL)
_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}

_model.setting(
    "path",
    "run.model",
    rules.path,
    "a local folder, the URL of one, or a name of the hub",
    kind="renamed",
)


@_model.rule(
    "enable_gradient_checkpointing",
    "learner.recompute",
    'True, verl\'s default, is `"full"` for FSDP; with Megatron `recompute_granularity` decides',
    default=True,
)
def _recompute(value: Value, keys: VerlKeys) -> Counterpart:
    if _is_megatron(keys):
        return nothing("with Megatron override_transformer_config.recompute_granularity decides")
    return Counterpart({"learner.recompute": "full"}) if value is True else nothing(OFF)


def _is_megatron(keys: VerlKeys) -> bool:
    names = [keys.get(key) for key in ("model_engine", f"{ACTOR}.strategy", "--config-name")]
    return any(key.startswith(f"{ACTOR}.megatron.") for key in keys.values) or any(
        "megatron" in str(name) for name in names
    )


# ---- adapters ------------------------------------------------------------------


def _without_adapters(keys: VerlKeys) -> str:
    return "" if keys.adapters else "no adapters are trained (lora_rank is 0)"


_model.setting(
    "lora_rank lora.rank",
    "lora.rank",
    rules.unless(_without_adapters, rules.present("the other rank is given")),
    "0 is without adapters",
    kind="kept",
)


def _without_older_rank(keys: VerlKeys) -> str:
    older = keys.integer(f"{MODEL}.lora_rank")
    return _without_adapters(keys) or ("" if older else "lora.alpha is that of lora.rank")


_model.setting(
    "lora_alpha",
    "lora.alpha",
    rules.unless(_without_older_rank, rules.number),
    "32 by default; verl has 16",
    default=16,
)
_model.setting("lora.alpha", "lora.alpha", rules.unless(_without_adapters, rules.number))


@_model.rule("target_modules lora.target_modules", "lora.targets", "Hugging Face's names of layers")
def _targets(value: Value, keys: VerlKeys) -> Counterpart:
    if not keys.adapters or value == "all-linear":
        return nothing("all linear layers, as by default")
    if not isinstance(value, list):
        return expected("all-linear or a list of layers", value)
    layers = [layer for name in value for layer in _LAYERS.get(str(name), (str(name),))]
    return Counterpart({"lora.targets": layers})


_model.setting(
    "lora_adapter_path lora.adapter_path",
    "lora.adapter",
    rules.unless(_without_adapters, rules.as_it_is),
)


def _published(setting: str) -> Rule:
    return lambda value, _: Counterpart({setting: "merged" if value is True else "auto"})


_model.setting(
    "lora.merge",
    "lora.publish",
    rules.unless(_without_adapters, _published),
    '`"merged"`, `"auto"`',
)

# ---- the rest ------------------------------------------------------------------

_model.left_to_write(
    "custom_chat_template",
    "sampling.chat_template",
    "a file, not its text",
    "a file, not its text",
    "sampling.chat_template: write the template into a file and name it",
)
TOPIC.dropped(
    f"{MODEL}.trust_remote_code critic.model.trust_remote_code "
    "reward_model.model.trust_remote_code",
    "code of a model is never run: families are known by name ([models.md](models.md))",
)
_model.dropped(
    "mtp.**", "layers that predict further tokens are not trained nor used; exports keep them"
)
TOPIC.dropped(
    f"{MODEL}.use_remove_padding {ACTOR}.use_remove_padding", "always on: sequences are packed"
)
_model.dropped(
    "override_config.** override_config", "a model is what its config.json says: change that file"
)
_model.dropped(
    "use_shm external_lib hf_config_path tokenizer_path use_liger use_fused_kernels "
    "fused_kernel_options.** tiled_mlp.** enable_activation_offload exclude_modules "
    "use_prefix_tree prefix_tree_attention lora.*",
    "the learner's model is Megatron-Core's, with kernels of its own",
)
