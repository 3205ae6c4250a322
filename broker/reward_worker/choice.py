"""Pure: which of several reward functions scores an answer, and which rows it can read."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.messages import NamedReward
from slipstream.broker.rewards.loading import load_reader
from slipstream.broker.rewards.outcomes import failure
from slipstream.broker.rewards.sdk import Reader
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Prompt


class RewardChoice:
    """The functions of [reward], and which of them a data source has."""

    def __init__(self, settings: RewardSection, *, function: str = "") -> None:
        """Take the functions of the settings, or ``function`` for every data source.

        ``function`` gets reward.options; reward.sources are ignored then.

        Raises:
            ConfigError: a data source names no function.
        """
        name = function or settings.function
        self.rewards = [NamedReward(setting="reward", function=name, options=settings.options)]
        self._by_source: dict[str, int] = {}
        for source, table in settings.sources.items() if not function else ():
            setting = f"reward.sources.{source}"
            if not table.function:
                raise ConfigError(f"{setting}.function is not set")
            self._by_source[source] = len(self.rewards)
            self.rewards.append(
                NamedReward(setting=setting, function=table.function, options=table.options)
            )

    def index_of(self, data_source: str) -> int:
        """Return the place in ``rewards`` of the function for a data source."""
        return self._by_source.get(data_source, 0)


@dataclass(slots=True)
class RewardReading:
    """Rows that the reader of one reward could not read."""

    function: str
    num_rows: int = 0
    unread: list[tuple[Prompt, str]] = field(default_factory=list)  # rows and reasons

    @property
    def found(self) -> str:
        """Number of the rows whose answers cannot be scored, and the reason for the first."""
        prompt, reason = self.unread[0]
        return (
            f"{len(self.unread):,} of {self.num_rows:,} rows: no ground truth that "
            f"{self.function.rpartition('.')[2]} reads, row {prompt.row}: {reason}"
        )


def read_rows(reward: RewardSection, prompts: Iterable[Prompt]) -> list[RewardReading]:
    """Have the reward of each row read it, where it declares how; return what was unreadable.

    Raises:
        ConfigError: a reward cannot be loaded here; ``is_missing`` finds the cause.
    """
    choice = RewardChoice(reward)
    readers: dict[int, Reader | None] = {}
    readings = [RewardReading(named.function) for named in choice.rewards]
    for prompt in prompts:
        place = choice.index_of(prompt.data_source)
        if place not in readers:
            named = choice.rewards[place]
            readers[place] = load_reader(named.function, named.options, setting=named.setting)
        if (read := readers[place]) is None:
            continue
        readings[place].num_rows += 1
        try:
            read(prompt)
        except Exception as error:  # noqa: BLE001 foreign code may raise anything
            readings[place].unread.append((prompt, failure(error).unavailable))
    return [reading for reading in readings if reading.unread]


def is_missing(error: BaseException | None) -> bool:
    """True if a reward was not loaded because this machine lacks a module, or it is misspelled."""
    return error is not None and (isinstance(error, ImportError) or is_missing(error.__cause__))
