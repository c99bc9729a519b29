"""Shows how a chat is opened, and how an engine is built: the modules that the call walks through.

    python tools/lab/walks.py            # the two numbers of stays
    python tools/lab/walks.py --list     # each stay of the chat

A stay is a function that a function of another module called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxpage.assembly import build_engine
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.settings.engine_config import EngineConfig
from tests.support.walks import walk, within
from tests.support.wire import context

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story"}],
}
ENGINE: dict[str, Any] = {
    "model": "demo",
    "max_num_seqs": 1,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the stays."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print each stay of the chat")
    arguments = parser.parse_args(argv)
    model = context()
    open_chat({**CHAT, "max_tokens": 8}, model)  # the first one starts the renderer
    chat = within(walk(lambda: open_chat({**CHAT, "max_tokens": 8}, model)), "serving/wire/")
    print(f"open_chat: {len(chat)} stays in {len({stay.module for stay in chat})} modules of wire/")
    if arguments.list:
        for stay in chat:
            print(f"  {stay.caller or '-'} -> {stay.module}: {stay.function}")
        return
    built = walk(lambda: build_engine(EngineConfig(**ENGINE, num_blocks=9)))
    inside = within(built, "assembly/")
    num_modules = len({stay.module for stay in inside})
    print(f"build_engine: {len(inside)} stays in {num_modules} modules of assembly/")


if __name__ == "__main__":
    main()
