"""What can go wrong, as users see it. Every error of jaxpage is a `JaxpageError`; its text says what, with the numbers, and what to do."""


class JaxpageError(Exception):
    """Base of every error that jaxpage raises on purpose."""


class ConfigError(JaxpageError, ValueError):
    """An engine setting is unknown, out of range, or contradicts another."""


class UsageError(JaxpageError):
    """The command line asks for something that cannot be; its exit status is 2."""


class CheckpointError(JaxpageError):
    """A checkpoint does not fit; the text lists everything that is wrong with it at once."""


class ModelNotFoundError(JaxpageError):
    """There is no model of this name: neither packaged, nor a local directory or GGUF file, nor on the hub."""


class UnsupportedError(JaxpageError, NotImplementedError):
    """A request or a setting is understood but cannot be honoured, so it is refused instead of ignored."""


class CapacityError(JaxpageError):
    """Something does not fit in memory: a model, a pool, or a request that can never be scheduled."""


class EventLogError(JaxpageError):
    """An event log cannot be replayed: it is damaged, or of another engine than the one at hand."""


class NotInLogError(EventLogError):
    """An event log does not have the step or the request that is asked for."""


class QueueFull(JaxpageError):
    """As many requests wait as may wait. Later there is room again."""


class ShuttingDown(JaxpageError, RuntimeError):
    """The engine was shut down or takes no requests any more, or has ended this one because its time to finish was over."""


class NativeError(JaxpageError):
    """Native code of a library (a tokenizer, its regular expression) gave up on what it was given."""


class EngineFailed(JaxpageError):
    """The engine could not go on with this request, or not at all."""


class WeightsReplaced(JaxpageError):
    """The request was ended because the model gets other weights."""


class DeadlineExceeded(JaxpageError, TimeoutError):
    """The request did not finish within `request_timeout_seconds`; it was ended."""
