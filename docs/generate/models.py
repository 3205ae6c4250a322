"""The page of model families, generated from their tables and the tests' models.

Usage: python -m docs.generate.models > docs/models.md
"""

import sys
from collections.abc import Iterator, Mapping

from slipstream.wire.models.config_keys import FIXED_KEYS, IGNORED_KEYS, KEYS_OF_ALL
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.models.families.tables import Family, Table
from slipstream.wire.models.hf_config import ROPE_RULES
from slipstream.wire.models.shelf import shelf
from tests.support.family_models import IN_MAKE_TEST, MODELS
from tests.support.shelf import SHELF

_HEAD = """# Model families

This page is generated from `wire/models/families/` and `tests/support/family_models.py`
(`python -m docs.generate.models`).

A policy is a folder of Hugging Face: config.json, safetensors, a tokenizer. `model_type` in its
config.json names the family. `slipstream align MODEL` compares learner, SGLang and transformers on
the same tokens, layer by layer, and names the first one that differs.

## Families
"""
_TESTED = """
Every tiny model is random, of three layers, written by transformers, and passes
`pytest tests/integration/test_families.py`:

- `slipstream align`: outputs of every attention and MLP, the experts of every token, and
  log-probabilities of the learner (two ranks of tensor parallelism, with expert parallelism where
  there are experts; then two pipeline stages) and of SGLang are those of transformers, in float32,
  to 1e-4. Experts are the same for every token.
- A layer's outputs and gradients are those of Megatron's own experts, computed one after another,
  to 1e-6, where there are experts (`pytest tests/integration/test_experts.py`: one rank, expert
  parallelism, experts divided in parts).
- The tensors that are exported and published are those that were loaded, bit for bit, under tensor,
  pipeline and expert parallelism of 2 and their product.

Those in bold are in `make test`, the others in `make test-slow`. The update is the same in every
layout for `qwen2`, `qwen3`, `qwen3_moe`, `deepseek_v3`, `gpt_oss`, those with gated delta
networks and those with a vision tower, frozen and trained (`pytest
tests/integration/test_layouts.py`). Logits and positions of several images in one pack are those of
transformers, of each alone. A
whole run with SGLang trains and publishes `llama`, `qwen3`, `qwen3_moe`, `deepseek_v3`,
`qwen3_next`, Qwen3.5 in the form of the hub, and `gpt_oss` in MXFP4
(`tests/e2e/test_whole_loop.py`, `test_targets.py`). SGLang ran on a CPU alone: there
latent attention, unscaled rotary embeddings beside it and the gate of Qwen2-MoE's shared expert are
corrected (`generators/sglang/cpu_models.py` names each line of SGLang's), and attention computes
windows and sinks (`generators/sglang/cpu.py`, `gpt_oss.py`). Engines whose two ranks have half of
the experts each hold every tensor, and choose and compute what the learner does, in every family
with experts, also with two groups of attention but for `mixtral` (`pytest
tests/integration/test_routing_replay.py`). None of the published models was run. The config.json of
{published} of them (`tests/support/shelf.py`) are read as
transformers reads them, with the number of parameters that their pages show.

## What is taken from config.json

Of every family: {of_all}. Of some:
"""
_REFUSED = """
## Tokenizers

A folder without tokenizer.json is copied into `run.cache_dir` with one that transformers makes
(extra `conversion`; weights are links): from sentencepiece's `tokenizer.model`, from `vocab.json`
and `merges.txt`, or from a file of tiktoken's. The last has the pattern that splits texts in code
(`pat_str`, as of Moonlight). That code is not run: literals, names and `join` are read, and a
pattern that is computed in another way is refused. The numbers of added tokens come from
`added_tokens_decoder` or added_tokens.json. What has other tokens than sentencepiece's own is
refused, too (docs/adr/0060).

## What is refused

- A key that is not above, not in the lists below, and not null: by its name, because it may change
  what the model computes. Delete it if it does not.
- Another value than these, in every family: {fixed}; `layer_types` other than the family has.
- `rope_scaling` or `rope_parameters` of another kind than {rope}, and keys of them that the rule
  does not have. Latent attention takes YaRN alone, with both of `mscale` and `mscale_all_dim` or
  neither.
- `quantization_config` other than fp8 (e4m3) in blocks, and MXFP4 of gpt-oss. Those weights are
  dequantized while they are loaded, and trained, published and exported in `learner.dtype`
  (bfloat16): an export of gpt-oss has no blocks, and no `quantization_config`. Engines get what is
  published: unquantized, or as `weightbus.precision` has it.
- Numbers that no model has: sizes below 1, above 1024 layers or 4096 experts, groups that do not
  divide the experts, an odd number of channels that turn.
- An output layer of other values beside `tie_word_embeddings` = true, as some merged adapters leave
  one: it would be dropped. Set the key to false, which is what transformers makes of such a folder.
- Tensors of another type: those of 8 or 4 bits without the scales of their blocks, integers.
- Sizes that the layout does not divide, such as experts by `learner.expert_parallel`: with both
  numbers and the setting.
- Layouts that divide heads of attention with windows or sinks between rings
  (`learner.context_parallel` above what divides the heads), or experts with biases
  (`learner.expert_tensor_parallel`).
- Images in prompts of families without a vision tower above (of Qwen3.5 the language model is
  trained alone), videos, and image processors other than Qwen2-VL's. Trained towers next to
  adapters (`lora.rank`), and teachers behind an endpoint.
- Families that are not here, with those that are.

Kept, with a line in the learner's log: layers that predict further tokens, and the vision tower of
a published folder (`text_config` in its config.json), are not trained, and not loaded either but
for a tower of Qwen2.5-VL and Qwen3-VL, which are trained with `learner.vision = "trained"`;
an export has them as they were, in the form of the folder that the run began with: its names, and
all experts of a layer in one tensor if it has them so. A router's bias
(`e_score_correction_bias`) and the decays of linear attention (`A_log`) are loaded, published and
exported in float32 and never change.

Adapters (`lora.rank`) can be of every linear layer of every family:
[lora.md](lora.md#targets-of-each-family) has the names, and which of them engines hold next to the
weights.

Keys that change nothing here: {ignored}. Of one family: {ignored_of_families}.
"""
_SHELF = """## Models by name

What `slipstream check` answers for these names of the Hugging Face hub before anything is fetched
(`wire/models/shelf.json`); of other names config.json decides.
"""


def reference() -> str:
    """Return the whole page."""
    lines = [
        _HEAD,
        "| `model_type` | models | attention | experts | tiny models |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(family) for family in FAMILIES.values()]
    lines.append(_TESTED.format(of_all=_names(KEYS_OF_ALL), published=len(SHELF)))
    lines.append("| family | keys of its own | must be, or absent | taken where absent |")
    lines += ["|---|---|---|---|", *(_config_row(family) for family in FAMILIES.values())]
    fixed = _values(FIXED_KEYS)
    rope = ", ".join(f"`{rule}`" for rule in ROPE_RULES)
    of_families = "; ".join(
        f"{name}: {_names(family.ignored)}" for name, family in FAMILIES.items() if family.ignored
    )
    lines.append(
        _REFUSED.format(
            fixed=fixed, rope=rope, ignored=_names(IGNORED_KEYS), ignored_of_families=of_families
        )
    )
    lines += [_SHELF, "| model | `model_type` | parameters | |", "|---|---|---|---|"]
    lines += [
        f"| {name} | `{one.model_type}` | {f'{one.billions:g} B' if one.billions else '-'} | "
        f"{one.why or 'trains'} |"
        for name, one in shelf().items()
    ]
    return "\n".join(lines)


def _row(family: Family) -> str:
    tiny = [
        f"**{name}**" if name in IN_MAKE_TEST else name
        for name, model in MODELS.items()
        if model["model_type"] == family.model_type
    ]
    cells = (f"`{family.model_type}`", family.models, _attention(family), _experts(family))
    return f"| {' | '.join((*cells, ', '.join(tiny)))} |"


def _attention(family: Family) -> str:
    options = {option.key for option in family.options}
    traits: Iterator[str] = (
        text
        for text, holds in (
            ("latent (MLA)", family.is_latent),
            ("grouped queries", not family.is_latent),
            ("bias", "self_attention.linear_qkv.bias" in family.layer),
            ("bias by attention_bias", "attention_bias" in options),
            (
                "queries and keys normalized",
                any("self_attention.k_layernorm.weight" in table for table in _of_all(family)),
            ),
            ("queries and keys normalized by use_qk_norm", "use_qk_norm" in options),
            ("bias of the output", "self_attention.linear_proj.bias" in family.layer),
            ("sinks", "self_attention.core_attention.softmax_offset" in family.layer),
            ("windows in some layers", any(kind.has_window for kind in family.kinds.values())),
            ("neighbors turn", family.turns_pairs),
            ("gate of the output", family.gates_attention),
            ("gated delta networks between", any(kind.is_linear for kind in family.kinds.values())),
            ("a quarter of a head turns", family.defaults.get("partial_rotary_factor") == 0.25),
            ("half of a head turns", family.defaults.get("partial_rotary_factor") == 0.5),
            ("norms after attention and MLP", "mlp_bda.norm.weight" in family.layer),
            ("a vision tower", family.tower is not None),
        )
        if holds
    )
    return ", ".join(traits)


def _of_all(family: Family) -> Iterator[Table]:
    """Yield the tables of all layers and of each kind."""
    yield from (family.layer, *(kind.layer for kind in family.kinds.values()))


def _experts(family: Family) -> str:
    if not family.has_experts:
        return "-"
    router, sparse = family.router, family.sparse
    shared = any("shared_experts" in name for name in sparse)
    traits: list[str] = [router.score]
    traits += ["bias for the choice"] if router.has_bias else []
    traits += ["groups"] if "n_group" in family.keys else []
    traits += ["biases"] if "mlp.router.bias" in sparse else []
    traits += ["limited SwiGLU"] if family.activation.is_limited else []
    traits += ["all of a layer in one tensor"] if family.stacks_experts else []
    traits += ["shared"] if shared else []
    traits += ["gate of the shared"] if any("gate_weight" in name for name in sparse) else []
    traits += ["dense layers first"] if "first_k_dense_replace" in family.keys else []
    return ", ".join(traits)


def _config_row(family: Family) -> str:
    own = family.keys | family.renamed.keys() | {option.key for option in family.options}
    cells = (
        f"`{family.model_type}`",
        _names(own),
        _values(family.config),
        _values(family.defaults),
    )
    return f"| {' | '.join(cells)} |"


def _names(keys: frozenset[str] | set[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys)) or "-"


def _values(values: Mapping[str, object]) -> str:
    return ", ".join(f"`{key}` = `{value}`" for key, value in values.items()) or "-"


def main() -> int:
    """Print the page."""
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
