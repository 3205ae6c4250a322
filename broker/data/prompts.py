"""All prompts of a run: those to train on and those held out."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.broker.config import BrokerSettings
from slipstream.broker.data.mixture import PromptSource
from slipstream.broker.data.sources import (
    load_eval_problems,
    load_training_prompts,
    local_data,
    local_eval,
)
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.settings.eval_metric import check_metric


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of a run."""

    training: PromptSource
    held_out: Sequence[Prompt]

    def counts(self) -> dict[str, int]:
        """Return the number of prompts, and of rows left out."""
        return {
            "rows": self.training.num_rows,
            "rows_skipped": self.training.num_skipped,
            "eval_problems": len(self.held_out),
        }


def load_prompts(settings: BrokerSettings, images: ImageFolder | None = None) -> Prompts:
    """Read the training prompts and the held-out problems.

    Their images are kept in a folder, if one is named.

    Raises:
        ConfigError: a file is missing, empty or malformed; or eval.metric does not fit them.
    """
    run, evaluation = settings.run, local_eval(settings.eval, settings.run)
    training = load_training_prompts(local_data(settings.data, run), seed=run.seed, images=images)
    held_out = load_eval_problems(evaluation, settings.data, images) if evaluation.enabled else []
    if held_out:
        sources = {problem.data_source for problem in held_out}
        check_metric(settings.eval.metric, samples=settings.eval.samples, sources=sources)
    return Prompts(training, held_out)
