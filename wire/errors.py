"""Every exception this project raises on purpose.

SlipstreamError
    ConfigError       the run cannot start with these settings
    ProtocolError     a peer sent something we do not speak
    RefusedError      a peer understood the request and refused it, with a reason
        ForbiddenError    not with this key, or not in this role
        SlowDownError     more than a peer may ask at a time
        NameTakenError    a process that is connected has this name
    PeerLostError     a peer missed its deadline
    ChildDiedError    a process that we started ended before its time
    EngineError       an inference engine answered with an error
    QuarantineError   an engine computes something else than the learner
    PublishError      a weight transfer failed; the engine may be torn
    SupersededError   another process has taken this one's place
    StoreLostError    the store has lost acknowledged changes
    ImageError        an image of the run is missing, changed on disk, or has no room
        HostRoomError     this host has no room for it
"""


class SlipstreamError(Exception):
    """Base of the tree: catch this at the top of a role and nowhere else."""


class ConfigError(SlipstreamError):
    """The run cannot start with these settings."""


class ProtocolError(SlipstreamError):
    """A peer sent something we do not speak."""


class RefusedError(SlipstreamError):
    """A peer understood the request and refused it, with a reason."""


class ForbiddenError(RefusedError):
    """A peer may not ask this: not with its key, or not in its role."""


class SlowDownError(RefusedError):
    """A peer exceeds its limit of requests."""


class NameTakenError(RefusedError):
    """A process that is connected has this name: come again when it has gone."""


class PeerLostError(SlipstreamError):
    """A peer missed its deadline."""


class SupersededError(SlipstreamError):
    """Another process has taken this one's place: this one must stop."""


class StoreLostError(SlipstreamError):
    """The store has lost acknowledged changes."""


class ImageError(SlipstreamError):
    """An image of the run is missing, changed on disk, or has no room."""


class HostRoomError(ImageError):
    """An image cannot be written on this host, which is no fault of its prompt."""


class ChildDiedError(SlipstreamError):
    """A process that we started ended before its time."""


class EngineError(SlipstreamError):
    """An inference engine answered with an error, or not at all."""


class EngineRefusedError(EngineError):
    """An inference engine answered a request with an error."""


class QuarantineError(SlipstreamError):
    """An engine computes something else than the learner under the same version."""


class PublishError(SlipstreamError):
    """A weight transfer failed; the engine may hold parts of two versions."""


def known_errors(error: BaseException) -> list[SlipstreamError]:
    """Return the errors of this project in an error: itself, or those of a group's tasks."""
    if isinstance(error, BaseExceptionGroup):
        return [known for inner in error.exceptions for known in known_errors(inner)]
    return [error] if isinstance(error, SlipstreamError) else []


def text_of(error: BaseException) -> str:
    """Return the first line of an error, with its kind if it is no SlipstreamError."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {text}"
