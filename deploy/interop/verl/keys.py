"""verl's keys: the places that they begin with, and what several of them say together. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.deploy.interop.verl.hydra import Value

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
MODEL, OPTIM = "actor_rollout_ref.model", f"{ACTOR}.optim"
MEGATRON = (f"{ACTOR}.megatron", f"{ACTOR}.mindspeed")  # the second takes the first's names


def below(place: str, names: str) -> str:
    """Return keys below a place, from their names with spaces between them."""
    return each((place,), names)


def each(places: Iterable[str], names: str) -> str:
    """Return the keys of these names below each of some places."""
    return " ".join(f"{place}.{name}" for place in places for name in names.split())


@dataclass(frozen=True, slots=True)
class VerlKeys:
    """The keys of verl that were given, without nulls. Several names have spaces between them."""

    values: Mapping[str, Value]
    home: str = ""  # folder that ~ means; empty leaves ~
    vocab_size: int = 0  # vocabulary of the model, 0 if it is not here
    key: str = ""  # the key to translate

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, names: str, *, default: Value = None) -> Value:
        """Return the value of the first of these keys that was given."""
        return next((self.values[name] for name in names.split() if name in self.values), default)

    def number(self, names: str, *, default: float = 0) -> float:
        """Return the number of the first of these keys that was given."""
        value = self.get(names)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value if math.isfinite(value) else default

    def integer(self, names: str, *, default: int = 0) -> int:
        """Return the same as an integer."""
        return int(self.number(names, default=default))

    def has_true(self, names: str) -> bool:
        """Return whether any of these keys is true."""
        return any(self.values.get(name) is True for name in names.split())

    @property
    def has_kl(self) -> bool:
        """Whether there is a reference policy."""
        return self.has_true(f"{ACTOR}.use_kl_loss algorithm.use_kl_in_reward")

    def path(self, name: Value) -> str:
        """Return a path without ~."""
        text = str(name)
        return f"{self.home}{text[1:]}" if self.home and text.startswith("~/") else text

    @property
    def estimator(self) -> str:
        """Name of the advantage in verl."""
        return str(self.get("algorithm.adv_estimator", default="gae"))

    @property
    def loss_mode(self) -> str:
        """Name of the surrogate in verl."""
        return str(self.get(f"{ACTOR}.policy_loss.loss_mode", default="vanilla"))

    @property
    def adapters(self) -> int:
        """The rank of the adapters, 0 without any."""
        return self.integer(f"{MODEL}.lora_rank") or self.integer(f"{MODEL}.lora.rank")

    @property
    def response_tokens(self) -> int:
        """The longest response."""
        return self.integer("data.max_response_length", default=512)

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return self.integer("data.max_prompt_length", default=512) + self.response_tokens
