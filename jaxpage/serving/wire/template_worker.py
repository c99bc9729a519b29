"""Renders chat templates and processes pictures in a process of its own.

`rendering.py` starts it: `python -m jaxpage.serving.wire.template_worker`. A template is a program
that came with a model, and one expression of it may take any time and memory in native code, which
no other thread can end; a picture is a file of anybody. So a child of this process works, with
limited processor time and memory, and the system kills it beyond them:

    server ──request──▶ child ──text──▶ server        the child stays for the next request
                         ╳ killed by SIGPROF
    server ◀──nothing── this process, which forks another child; the imports are done already

The processes exchange lines of JSON. For each [request, seconds, bytes] that comes in, a line
[problem or null, text or null] goes out; both are null if the time was over. The text for a picture
is empty: its arrays are in the file that the request names.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

if __name__ == "__main__":
    # Neither templates nor pictures need torch. Where it is installed, transformers would import
    # it, which takes seconds; where it is not, transformers would say so.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"

from safetensors.numpy import save
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from jaxpage import images
from jaxpage.worker_process import die_with_parent

MAX_CHARACTERS = 8 << 20  # a rendered text comes from a body of at most 4 MiB
# Real time may be this many times the processor time, because a busy machine shares its processors.
_PATIENCE = 4
_DONE = 0
_REPLACE_ME = 3


def main() -> None:
    """Forks a child that renders, and another one whenever a child must be replaced."""
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
    """Answers requests until there are no more, or until one used all the memory that it may.

    Args:
        before: The bytes of memory that this process had before the first request.
    """
    die_with_parent()
    has_images = False
    for line in sys.stdin:
        request, seconds, num_bytes = json.loads(line)
        answer = render_template
        if "picture" in request:
            if not has_images:
                # What the first picture imports counts neither as its time nor as its memory.
                has_images = bool(images.process_picture)
                before = before and _data_bytes()
            answer = process_picture
        if before:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (before + num_bytes, hard))
        # Nobody handles these signals, so they end the process even within native code.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * seconds)
        problem = None
        text = None
        has_room = True
        try:
            text = answer(request)
        except MemoryError:
            problem = f"it takes more than {num_bytes >> 20} MiB of memory"
            has_room = False
        except Exception as error:  # a template is a program, and may fail in any way
            problem = (str(error) or type(error).__name__)[:MAX_CHARACTERS]
        if text is not None and len(text) > MAX_CHARACTERS:
            problem = f"its text has {len(text)} characters, more than {MAX_CHARACTERS}"
            text = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not has_room:
            _answer(problem, text)
            os._exit(_REPLACE_ME)
        _answer(problem, text)
    os._exit(_DONE)


def render_template(request: dict[str, Any]) -> str:
    """Returns the text that `apply_chat_template` of a tokenizer makes for a request.

    Args:
        request: The template, the special tokens, the messages and the variables.
    """
    tokenizer = SimpleNamespace(
        special_tokens_map=request["special_tokens"],
        get_chat_template=lambda template, tools: template,
    )
    return str(
        PreTrainedTokenizerBase.apply_chat_template(
            tokenizer,  # a part of one is enough, because nothing is encoded
            request["messages"],
            tools=request["tools"],
            chat_template=request["template"],
            tokenize=False,
            add_generation_prompt=request["add_generation_prompt"],
            continue_final_message=request["continue_final_message"],
            **request["variables"],
        )
    )


def process_picture(request: dict[str, Any]) -> str:
    """Processes a picture, and writes its arrays as safetensors into a file.

    Args:
        request: The picture in base64, the most pixels, the settings and the options of the image
            processor, and the path of the file.
    """
    picture = images.load_picture(images.decode_base64(request["picture"]), request["max_pixels"])
    settings = images.ProcessorSettings(*request["settings"])
    arrays = images.process_picture(settings, picture, request["options"])
    Path(request["path"]).write_bytes(save(arrays))
    return ""


def _answer(problem: str | None, text: str | None) -> None:
    print(json.dumps([problem, text]), flush=True)


def _data_bytes() -> int:
    """Returns what RLIMIT_DATA counts of this process, or 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
