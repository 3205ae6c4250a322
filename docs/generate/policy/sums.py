"""What the agent quickstart's policy imitates: a teacher who often guesses, else calls a tool."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from slipstream.deploy.examples.addition import write_rows
from slipstream.deploy.examples.sums import HELD_OUT, Problem, problems, question
from tests.support.blank_model import write_blank_model

_SPECIALS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<tool>", "<system>")
# A call is text as of Qwen2.5, of three tokens and the digits between them.
_CALL = ('<tool_call>\n{"name": "add", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>")
_TEMPLATE = """\
{%- for message in messages %}
{{- '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
# How often the teacher does what leads on: call with the first two numbers, call with that sum and
# the third, say the result. Else he says some number of the right length.
_LEADS_ON = (0.4, 0.6, 0.9)


def write_blank_sums_model(folder: Path) -> None:
    """Write the configuration, tokenizer and chat template of the policy, without weights."""
    write_blank_model(folder)
    vocabulary = {token: i for i, token in enumerate([*_SPECIALS, *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in _CALL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def write_demonstrations(folder: Path) -> None:
    """Write demonstrations.jsonl, and what leads on: train.jsonl and held_out.jsonl."""
    draw = random.Random(8)  # noqa: S311 not for secrets
    taught = []
    for problem in problems()[HELD_OUT:]:
        for (prompt, best), share in zip(_turns(problem), _LEADS_ON, strict=True):
            said = best if draw.random() < share else str(draw.randint(30, 297))
            taught.append({"prompt": prompt, "ground_truth": said})
    write_rows(folder / "demonstrations.jsonl", taught)
    everything = problems()
    for name, part in (("held_out", everything[:HELD_OUT]), ("train", everything[HELD_OUT:])):
        steps = [step for problem in part for step in _turns(problem)]
        rows = [{"prompt": prompt, "ground_truth": best} for prompt, best in steps]
        write_rows(folder / f"{name}.jsonl", rows)


def _turns(problem: Problem) -> list[tuple[str, str]]:
    """Return what the policy sees in each turn, and what leads on."""
    a, b, c = problem
    turns = []
    text = f"<user>{question(problem)}<eos><assistant>"
    for call, result in (((a, b), a + b), ((a + b, c), a + b + c)):
        said = f"{_CALL[0]}{call[0]}{_CALL[1]}{call[1]}{_CALL[2]}"
        turns.append((text, said))
        text += f"{said}<eos><tool>{result}<eos><assistant>"
    return [*turns, (text, str(a + b + c))]
