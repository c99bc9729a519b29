"""Gives the prompts of the tasks that `jaxpage bench speculation` measures, as tokens of a model.

A task has twenty prompts of this project's own text, in one file of `tasks/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from jaxpage.checkpoints.tokenizers import tokenizer_of
from jaxpage.engine.calls import chat_prompt
from jaxpage.errors import UsageError
from jaxpage.settings.engine_config import EngineConfig

TASKS = ("summarise", "edit", "continue", "chat", "translate")
SEPARATOR = "\n====\n"


def task_texts(task: str) -> list[str]:
    """Returns the prompts of a task."""
    file = resources.files("jaxpage.bench") / "tasks" / f"{task}.txt"
    return file.read_text(encoding="utf-8").strip().split(SEPARATOR)


def prompts_of_tasks(tasks: Sequence[str], config: EngineConfig) -> dict[str, list[list[int]]]:
    """Returns the prompts of tasks as token ids, as messages where the model has a chat template.

    Raises:
        UsageError: The model has no tokenizer.
    """
    tokenizer = tokenizer_of(config)
    if tokenizer is None:
        raise UsageError(f"--tasks: the model {config.model!r} has no tokenizer")

    def encode(text: str) -> list[int]:
        if tokenizer.chat_template is None:
            token_ids: list[int] = tokenizer(text)["input_ids"]
            return token_ids
        message = {"role": "user", "content": text}
        prompt: list[int] = chat_prompt(tokenizer, [message], None, {})["prompt_token_ids"]
        return prompt

    return {task: [encode(text) for text in task_texts(task)] for task in tasks}
