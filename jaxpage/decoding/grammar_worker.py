"""Tries grammars in a process of its own, before the engine compiles them.

The engine starts it with `python -m jaxpage.decoding.grammar_worker`. llguidance's limits bound the
cost of a mask, but not the time and the memory of building a matcher ({"multipleOf": 1234567} took
half a minute and 700 MB), and a thread in native code cannot be ended. So a child of this process
tries each grammar, and is killed when its processor time is used up.

Messages are lines of JSON. The tokenizer comes first. Then each line [kind, value, seconds, bytes]
is answered by a line [problem or null, bytes].
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

from jaxpage.decoding.grammars import (
    matcher_of,
    overlap_of,
    problem_of,
    schemas_in,
    source_of,
    tokenizer_of,
)
from jaxpage.errors import UnsupportedError
from jaxpage.worker_process import die_with_parent

_MAX_REPORT = 1 << 16
# The wait is this many times the allowed seconds, because a busy machine gives a child only a part
# of its processor time.
_PATIENCE = 4
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes


def main() -> None:
    """Answers each grammar that comes in, until the engine closes the pipe."""
    try:
        tokenizer = tokenizer_of(sys.stdin.readline())
    except UnsupportedError:  # the engine finds the same problem and reports it
        return
    for line in sys.stdin:
        kind, value, seconds, num_bytes = json.loads(line)
        print(json.dumps(_try_grammar(tokenizer, kind, value, seconds, num_bytes)), flush=True)


def _try_grammar(
    tokenizer: Any, kind: str, value: str, seconds: float, num_bytes: int
) -> tuple[str | None, int]:
    """Returns the problem of a grammar or None, and the number of bytes that compiling it took."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # This counts processor time. SIGPROF ends the child wherever it is.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        # Some systems do not end a child with its parent. There the alarm ends it, a little after
        # the parent would have killed it.
        signal.alarm(math.ceil(_PATIENCE * seconds) + 1)
        die_with_parent()
        _try(tokenizer, kind, value, num_bytes, writer)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], _PATIENCE * seconds)
    report = os.read(reader, _MAX_REPORT) if ready else b""
    os.close(reader)
    # The child was not waited for yet, so its id cannot be that of another process.
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if report:
        problem, used = json.loads(report)
        return problem, used
    if not ready or os.WTERMSIG(status) == signal.SIGPROF:
        return f"compiling it takes longer than {seconds:g} s", 0
    return f"compiling it takes more than {num_bytes >> 20} MiB, or crashes", 0


def _try(tokenizer: Any, kind: str, value: str, num_bytes: int, writer: int) -> NoReturn:
    """Tries a grammar in the child process; never returns."""
    try:
        # Hides what native code prints before it aborts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # Compile a small grammar first, so that memory which every grammar needs is not counted.
        problem_of(matcher_of(tokenizer[0], source_of("regex", '"a"')), tokenizer[1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (before * _RSS_UNIT + num_bytes, hard))
        try:
            matcher = matcher_of(tokenizer[0], source_of(kind, value))
            problem = problem_of(matcher, tokenizer[1])
            for schema in schemas_in(kind, value):
                problem = problem or overlap_of(tokenizer[0], schema)
        except ValueError as error:
            problem = str(error)
        used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * _RSS_UNIT
        os.write(writer, json.dumps((problem, used)).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
