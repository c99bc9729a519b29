"""Defines the errors that users see.

Every error that jaxpage raises on purpose is a `JaxpageError`. Its text says what is wrong, with
the numbers, and what to do.
"""


class JaxpageError(Exception):
    """Serves as the base of every error that jaxpage raises on purpose."""


class ConfigError(JaxpageError, ValueError):
    """Says that an engine setting is unknown, out of range, or contradicts another."""


class UsageError(JaxpageError):
    """Says that the command line asks for something impossible; its exit status is 2."""


class CheckpointError(JaxpageError):
    """Says that a checkpoint does not fit; the text lists everything that is wrong with it."""


class ModelNotFoundError(JaxpageError):
    """Says that no model has this name.

    It is no packaged model, no local directory or GGUF file, and not on the hub.
    """


class UnsupportedError(JaxpageError, NotImplementedError):
    """Refuses a request or setting that is understood but cannot be honoured."""


class CapacityError(JaxpageError):
    """Says that a model, a pool, a prefix or a request does not fit in memory."""


class EventLogError(JaxpageError):
    """Says that an event log is damaged, or belongs to another engine than the one at hand."""


class NotInLogError(EventLogError):
    """Says that an event log does not have the step or the request that is asked for."""


class ReceiptError(JaxpageError):
    """Says that something is no receipt, or one that this version cannot read."""


class QueueFull(JaxpageError):
    """Refuses a request because as many wait as may wait; later there is room again."""


class ShuttingDown(JaxpageError, RuntimeError):
    """Says that the engine takes no more requests, or ended this one, because it shuts down."""


class NativeError(JaxpageError):
    """Says that native code of a library, such as a tokenizer, failed on its input."""


class EngineFailed(JaxpageError):
    """Says that the engine could not go on with this request, or cannot go on at all."""


class WeightsReplaced(JaxpageError):
    """Says that the request was ended because the model gets other weights."""


class RequestGone(JaxpageError, LookupError):
    """Says that a request cannot be continued, because it is not kept, or never was aborted."""


class DeadlineExceeded(JaxpageError, TimeoutError):
    """Says that the request did not finish within `request_timeout_seconds` and was ended."""
