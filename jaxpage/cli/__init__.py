"""Runs the command `jaxpage`, and turns every failure into one line and an exit status.

Generated text and reports go to standard output, everything else to standard error. The status is 0
after success, 1 after a failure and 2 after wrong use.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Sequence

from jaxpage.cli.parsers import make_parser
from jaxpage.errors import (
    ConfigError,
    JaxpageError,
    NotInLogError,
    ReceiptError,
    UnsupportedError,
    UsageError,
)

__all__ = ["main"]  # runs the command

# Python's garbage collector looks through young objects after so many new ones, then through older
# ones and through all after so many rounds. A start makes some 300,000 objects that stay: with
# Python's own numbers (700, 10, 10) it looks through all of them time and again, which is a second
# with transformers, and with 20,000 through each of them once, which is 0.15 s.
_COLLECTION_THRESHOLDS = (500_000, 50, 100)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: The words after the command's name; None for those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    # At its exit Python looks through all objects once more, for 0.2 s, and frees them one by one.
    atexit.register(gc.freeze)
    # The warnings of transformers are for people who program with it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        parser = make_parser(words)
        if not words:
            parser.print_help()
            return 0
        arguments = parser.parse_args(words)
        status: int = arguments.run(arguments) or 0
        # A reader that has ended is noticed here, and not while Python exits.
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has ended
        # Python flushes standard output once more at its exit, and would print an error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except (
        ConfigError,
        NotInLogError,
        ReceiptError,
        UnsupportedError,
        UsageError,
    ) as error:
        return _fail(str(error), 2)
    except JaxpageError as error:
        return _fail(str(error), 1)
    except Exception as error:
        hint = "" if os.environ.get("JAXPAGE_DEBUG") else " (JAXPAGE_DEBUG=1 shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", 1)


def _fail(message: str, status: int) -> int:
    if os.environ.get("JAXPAGE_DEBUG"):
        traceback.print_exc()
    print(f"jaxpage: error: {message}", file=sys.stderr)
    return status
