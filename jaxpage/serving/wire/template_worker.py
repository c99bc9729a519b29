"""A process that renders chat templates: `python -m jaxpage.serving.wire.template_worker`, started by `rendering.py`.

A template is a program that came with a model, and one expression of it may take any time and memory in native code, which no other
thread can end. So a child of this process renders, with a time of the processor and a memory, and the system kills it beyond them:

    server ──request──▶ child ──text──▶ server        the child stays for the next request
                         ╳ killed by SIGPROF
    server ◀──nothing── this process, which forks another child; what it imported is there already

Lines of JSON: for each [request, seconds, bytes] that comes in [problem or null, text or null] goes out; both are null if its time was
over.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from jaxpage.worker_process import die_with_parent

MAX_CHARACTERS = 8 << 20  # of a rendered text: the body that it comes from has at most 4 MiB
# times the seconds: a machine that is busy with others gives a child less than all of its time
_PATIENCE = 4
_DONE, _REPLACE_ME = 0, 3


def main() -> None:
    before = _data_bytes()
    while True:
        child = os.fork()
        if child == 0:
            try:
                _serve(before)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
            _answer(None, None)
        elif not os.WIFEXITED(status) or os.WEXITSTATUS(status) != _REPLACE_ME:
            return


def _serve(before: int) -> NoReturn:
    """Answers requests until there are no more, or until one needed all the memory that it may have.

    Args:
        before: the bytes of memory that this process had before the first request.
    """
    die_with_parent()
    for line in sys.stdin:
        request, seconds, num_bytes = json.loads(line)
        if before:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (before + num_bytes, hard))
        # Signals that nobody handles end the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * seconds)
        problem, text, has_room = None, None, True
        try:
            text = rendered(request)
        except MemoryError:
            problem, has_room = f"it takes more than {num_bytes >> 20} MiB of memory", False
        except Exception as error:  # a template is a program, and may fail in any way
            problem = (str(error) or type(error).__name__)[:MAX_CHARACTERS]
        if text is not None and len(text) > MAX_CHARACTERS:
            problem, text = f"its text has {len(text)} characters, more than {MAX_CHARACTERS}", None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not has_room:
            _answer(problem, text)
            os._exit(_REPLACE_ME)
        _answer(problem, text)
    os._exit(_DONE)


def rendered(request: dict[str, Any]) -> str:
    """Returns what `apply_chat_template` of a tokenizer with this template and these special tokens returns."""
    tokenizer = SimpleNamespace(
        special_tokens_map=request["special_tokens"],
        get_chat_template=lambda template, tools: template,
    )
    return str(
        PreTrainedTokenizerBase.apply_chat_template(
            tokenizer,  # without text to encode it asks for no more
            request["messages"],
            tools=request["tools"],
            chat_template=request["template"],
            tokenize=False,
            add_generation_prompt=request["add_generation_prompt"],
            continue_final_message=request["continue_final_message"],
            **request["variables"],
        )
    )


def _answer(problem: str | None, text: str | None) -> None:
    print(json.dumps([problem, text]), flush=True)


def _data_bytes() -> int:
    """Returns what RLIMIT_DATA counts of this process, or 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
