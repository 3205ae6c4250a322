"""A recorded trajectory as the page draws it: turns, and the context between them. Pure."""

from collections.abc import Iterator

from slipstream.broker.history.trajectories import Stretch, Token, TrainedRow
from slipstream.wire.files.trained_parts import TrajectoryPart, called_tools, excerpt, parts_of

MAX_DRAWN = 20_000  # tokens of one trajectory
MAX_STRETCHES = 1_000
MAX_CONTEXT = 200_000  # characters of all context of a trajectory
MAX_ONE_CONTEXT = 8_000


def drawn(row: TrainedRow) -> tuple[list[Stretch], list[Token]]:
    """Return the stretches of a trajectory, and the first of the tokens of its turns."""
    parts = parts_of(row.token_ids, row.chosen, row.branches)
    all_tokens = list(_tokens(row))
    most = min(MAX_ONE_CONTEXT, MAX_CONTEXT // max(1, len(parts)))
    stretches: list[Stretch] = []
    tokens: list[Token] = []
    for number, part in enumerate(parts):
        first = row.num_prompt_tokens
        own = all_tokens[part.first_token - first : part.end - first]
        if not part.turn:
            stretches.append(_context(part, [token.text for token in own], most))
            continue
        room = MAX_DRAWN - len(tokens) if number < MAX_STRETCHES else 0
        tokens += own[:room]
        at = part.turn - 1
        stretches.append(
            Stretch(
                num_tokens=part.end - part.first_token,
                turn=part.turn,
                num_drawn=min(room, len(own)),
                reward=row.turn_rewards[at] if at < len(row.turn_rewards) else None,
                calls=called_tools("".join(token.text for token in own)),
            )
        )
    return stretches, tokens


def _context(part: TrajectoryPart, texts: list[str], most: int) -> Stretch:
    shared = "".join(texts[: part.num_shared])
    return Stretch(
        num_tokens=part.end - part.first_token,
        text=excerpt("".join(texts[part.num_shared :]), most),
        branch=part.branch,
        num_shared=part.num_shared,
        shared_with=part.shared_with,
        shared=excerpt(shared, most) if shared else None,
    )


def _tokens(row: TrainedRow) -> Iterator[Token]:
    """Yield the tokens after the prompt; without their texts all of it is at the first one."""
    count = len(row.token_ids) - row.num_prompt_tokens
    texts = row.token_texts or [row.answer] + [""] * (count - 1)
    runs = list(row.version_runs)
    for place, (text, diff) in enumerate(zip(texts, row.logprob_diffs, strict=False)):
        at = row.num_prompt_tokens + place
        while len(runs) > 1 and runs[1].first_token <= at:
            runs.pop(0)
        version, step = (runs[0].version, runs[0].step) if runs else ("", row.step)
        yield Token(text, version, row.step - step, diff)
