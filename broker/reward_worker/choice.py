"""Pure: which of several reward functions scores an answer."""

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.messages import NamedReward
from slipstream.wire.errors import ConfigError


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
