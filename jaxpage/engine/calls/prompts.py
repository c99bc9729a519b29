"""Converts the forms in which prompts and parameters may be given into one form."""

from __future__ import annotations

import functools
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from jaxpage import images
from jaxpage.engine.vector_sources import NO_PICTURES
from jaxpage.errors import UnsupportedError

FORMS = (
    "a string, a list of token ids, {'prompt': ...}, {'prompt_token_ids': [...]}, "
    "{'prompt_embeds': array}, or a list of those; a prompt with pictures is "
    "{'prompt': ..., 'multi_modal_data': {'image': [...]}}"
)
Messages = Sequence[Mapping[str, Any]]  # the messages of one conversation
_Params = TypeVar("_Params")
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt as text, as token ids, or as both when the text has been encoded.

    Attributes:
        text: The text, if there is one.
        token_ids: The token ids, if they are known.
        vectors: An array of vectors in place of both, if a caller gave one.
        pictures: The pictures, in the order of their markers.
    """

    text: str | None
    token_ids: tuple[int, ...] | None
    vectors: Any = None
    pictures: tuple[Any, ...] = ()


def accept_sampling_params(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the method with `sampling_params`, vLLM's name, as another name of `params`."""

    @functools.wraps(method)
    def call_renamed(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        if "sampling_params" in keywords:
            if "params" in keywords:
                raise TypeError(
                    f"{method.__qualname__} takes params or sampling_params, its other name, and "
                    "not both"
                )
            keywords["params"] = keywords.pop("sampling_params")
        return method(*arguments, **keywords)

    return call_renamed


def normalise(prompts: Any) -> list[Prompt]:
    """Returns one `Prompt` for each prompt.

    A list of integers is one prompt; an empty list is no prompt.

    Raises:
        TypeError: The prompts have none of the forms, which the message lists.
    """
    prompts = as_list(prompts)
    if isinstance(prompts, str | dict) or _is_token_ids(prompts):
        return [_read_prompt(prompts)]
    if isinstance(prompts, list | tuple):
        return [_read_prompt(prompt) for prompt in prompts]
    raise TypeError(f"prompts must be {FORMS}; got {type(prompts).__name__}")


def as_list(values: Any) -> Any:
    """Returns an array (NumPy, JAX or PyTorch) as a list, and anything else unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values


def check_token_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """Returns token ids, which may be an array with one axis, as a list.

    Raises:
        TypeError: It is no list of integers.
        ValueError: An id is none of the model's.
    """
    values = as_list(token_ids)
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str | bytes)
        or not all(map(_is_integer, values))
    ):
        raise TypeError(
            "token_ids must be a list of integers, or an array of them with one axis; got "
            f"{token_ids!r:.80}"
        )
    if wrong := [token_id for token_id in values if not 0 <= token_id < vocab_size]:
        raise ValueError(
            f"token_ids has {wrong[0]}, but the model's token ids are 0 to {vocab_size - 1}"
        )
    return [int(token_id) for token_id in values]


def chat_prompt(
    tokenizer: Any,
    messages: Any,
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    processor: images.PictureProcessor | None = None,
) -> dict[str, Any]:
    """Returns the prompt of a conversation, by the chat template; see `LLM.chat_prompt`.

    Args:
        tokenizer: The tokenizer, which has a template.
        messages: The messages.
        tools: The tools.
        variables: The variables of the template.
        processor: What processes the pictures of the messages; None if the model takes none.

    Raises:
        UnsupportedError: A message has a picture, and the model takes none.
        ValueError, TypeError: The messages are refused.
    """
    if (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(isinstance(m, Mapping) for m in messages)
    ):
        raise TypeError(
            f"a conversation must be a list of {{'role': ..., 'content': ...}}; got "
            f"{messages!r:.80}"
        )
    pictures: list[Any] = []
    messages = [_check_message(message, pictures) for message in messages]
    if pictures and processor is None:
        raise UnsupportedError(NO_PICTURES)
    if options := [
        name for name in ("messages", "add_generation_prompt", "tokenize") if name in variables
    ]:
        raise ValueError(f"chat_template_kwargs cannot have {', '.join(options)}")
    template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    if processor is not None and images.takes_parts_alone(template):
        messages = [
            {**message, "content": images.parts_of_content(message.get("content"))}
            for message in messages
        ]
    requested = [*(["tools"] if tools else []), *variables]
    if unknown := [
        # A template ignores a variable that it does not name, and nothing is ignored silently.
        name
        for name in requested
        if not re.search(rf"\b{re.escape(name)}\b", template)
    ]:
        raise ValueError(f"the model's chat template has no {', '.join(unknown)}")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **variables
        )
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    if processor is not None and pictures:
        ready = processor.process(pictures)
        token_ids, _ = processor.expand(text, ready, add_special_tokens=False)
        data = {"multi_modal_data": {"image": ready}}
        return {"prompt": text, "prompt_token_ids": token_ids, **data}
    return {
        "prompt": text,
        "prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
    }


def _check_message(message: Mapping[str, Any], pictures: list[Any]) -> dict[str, Any]:
    """Returns the message with its parts joined as the server joins them.

    A message with pictures keeps its parts, and its pictures are added to the list.

    Raises:
        ValueError: The message has no role, or content that is neither text nor pictures.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a 'role'; got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = _join_parts(content, pictures)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{_CONTENTS}; got {content!r:.80}")
    return {**message, "content": content} if "content" in message else dict(message)


_CONTENTS = "content must be a string, or a list of parts of type 'text' or 'image'"


def _join_parts(content: Sequence[Any], pictures: list[Any]) -> Any:
    """Returns the text of parts, or parts for the template if one of them is a picture."""
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in images.PICTURE_TYPES:
            pictures.append(images.picture_in(part))
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise ValueError(f"{_CONTENTS}; got {content!r:.80}")
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _read_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(_valid_text(prompt), None)
    if isinstance(prompt, dict):
        return _from_dict(prompt)
    prompt = as_list(prompt)
    if isinstance(prompt, list | tuple) and all(_is_integer(token_id) for token_id in prompt):
        return Prompt(None, tuple(int(token_id) for token_id in prompt))
    raise TypeError(f"a prompt must be {FORMS}; got {prompt!r:.80}")


def _from_dict(prompt: dict[str, Any]) -> Prompt:
    if set(prompt) == {"prompt_embeds"} and prompt["prompt_embeds"] is not None:
        return Prompt(None, None, prompt["prompt_embeds"])
    if unknown := set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"}:
        raise TypeError(
            f"a prompt has unknown keys {sorted(map(str, unknown))}; it must be {FORMS}"
        )
    token_ids = as_list(prompt.get("prompt_token_ids"))
    text = prompt.get("prompt")
    if token_ids is None and text is None:
        raise TypeError(f"a prompt is empty; it must be {FORMS}")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"'prompt' must be a string; got {text!r:.80}")
    if token_ids is not None and not isinstance(token_ids, list | tuple):
        raise TypeError(f"'prompt_token_ids' must be a list of integers; got {token_ids!r:.80}")
    ids = None if token_ids is None else _read_prompt(token_ids).token_ids
    pictures = _pictures_of(prompt.get("multi_modal_data"))
    return Prompt(None if text is None else _valid_text(text), ids, pictures=pictures)


def _pictures_of(data: Any) -> tuple[Any, ...]:
    """Returns the pictures of `multi_modal_data`.

    Raises:
        TypeError: It is no dict.
        UnsupportedError: It has videos or sound.
    """
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise TypeError(f"multi_modal_data must be {{'image': [...]}}; got {data!r:.80}")
    if others := sorted(map(str, set(data) - {"image"})):
        raise UnsupportedError(f"multi_modal_data has {others}; pictures ('image') are supported")
    pictures = data.get("image")
    if isinstance(pictures, list | tuple):
        return tuple(pictures)
    return () if pictures is None else (pictures,)


def _valid_text(text: str) -> str:
    try:
        # A lone surrogate, which JSON can spell, is a str that no tokenizer takes.
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt contains invalid Unicode at character {error.start}: {text[error.start]!r}"
        ) from None
    return text


def _is_token_ids(prompts: Any) -> bool:
    return (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and all(_is_integer(item) for item in prompts)
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def one_each(
    params: _Params | Sequence[_Params], count: int, name: str = "params"
) -> list[_Params]:
    """Returns a list of parameters, one for each prompt.

    Args:
        params: One value for all prompts, or a list with a value for each.
        count: The number of prompts.
        name: The name of the argument, for the message of an error.

    Raises:
        ValueError: The list has another length.
    """
    if not isinstance(params, list | tuple):
        return [params] * count  # type: ignore[list-item]
    if len(params) != count:
        raise ValueError(f"{len(params)} {name} for {count} prompts: give one, or one per prompt")
    return list(params)
