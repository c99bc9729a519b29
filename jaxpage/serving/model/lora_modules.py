"""Serves LoRA adapters, which a request chooses by the field `model`.

The adapters of the setting `lora_modules` are there from the start; with `lora_directory` clients
load and unload further ones while the server runs.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jaxpage.assembly import lora_spec
from jaxpage.checkpoints import describe_model, read_adapter
from jaxpage.checkpoints.finding import resolve_model_config
from jaxpage.engine import Engine, directory_of
from jaxpage.errors import CheckpointError, ConfigError, ModelNotFoundError
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.request_limits import check_is_json
from jaxpage.serving.model.directories import directory_inside
from jaxpage.serving.requests.preparing import Preparing
from jaxpage.serving.settings.server_config import MODEL_NAME, ServerConfig
from jaxpage.serving.wire.body import check_fields, parse_object, text_field
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.lora_request import LoRARequest

MAX_ADAPTERS = 1024  # the most adapters that are served at a time


def check_lora_modules(
    engine: EngineConfig, config: ServerConfig, model_names: tuple[str, ...]
) -> None:
    """Checks all adapters of `lora_modules` before the model is loaded.

    It reads the model's config.json and the files of the adapters.

    Args:
        engine: The settings of the engine.
        config: The settings of the server.
        model_names: The names of the model, which no adapter may have.

    Raises:
        ConfigError: Adapters cannot be served, and the message says for each of them why: a name is
            taken, a directory does not exist, or tensors do not fit.
        JaxpageError: The model cannot be described; see `describe_model`.
    """
    modules = config.lora_modules or ()
    if not modules:
        return
    described = describe_model(
        resolve_model_config(engine.model, engine.revision), engine.quantization
    )
    spec = lora_spec(engine, described.family, described.spec)
    assert spec is not None  # `resolve_both` refuses lora_modules without enable_lora
    errors = []
    names = Counter([*model_names, *(module.partition("=")[0] for module in modules)])
    errors += [
        f"the name {name!r} is that of the model"
        if name in model_names
        else f"the name {name!r} is given twice"
        for name, count in names.items()
        if count > 1
    ]
    for requested in _parse_modules(modules):
        try:
            read_adapter(directory_of(requested), spec)
        except (CheckpointError, ModelNotFoundError) as error:
            errors.append(
                str(error)
                if requested.lora_name in str(error)
                else f"{requested.lora_name}: {error}"
            )
    if errors:
        raise ConfigError("lora_modules:\n" + "\n".join(errors))


def open_lora_modules(engine: Engine, config: ServerConfig) -> dict[str, LoRARequest]:
    """Opens the adapters of `lora_modules`, and returns them by name; check them first."""
    served = {
        requested.lora_name: requested for requested in _parse_modules(config.lora_modules or ())
    }
    for requested in served.values():
        engine.open_adapter(requested)
    return served


def _parse_modules(modules: Sequence[str]) -> list[LoRARequest]:
    named = [module.partition("=") for module in modules]
    return [
        LoRARequest(name, number, path) for number, (name, _, path) in enumerate(named, start=1)
    ]


class RuntimeAdapters:
    """Loads and unloads adapters while the server runs, from below one directory.

    It is used on one thread.
    """

    def __init__(self, engine: Engine, context: ModelContext, directory: Path):
        self._engine = engine
        self._context = context
        self._directory = directory
        # Those of `lora_modules` have the numbers from 1 on.
        self._numbers = itertools.count(1 + len(context.adapters))

    def load(self, body: dict[str, Any]) -> Response:
        """Loads an adapter; the answer has the digest of its numbers in a header.

        With `load_inplace` the numbers are kept in memory, and its files are not read again. The
        adapter may be there already; then new requests have the new numbers, and those that run or
        wait keep theirs.

        Raises:
            ApiError: A field is wrong, the name is taken, there are too many adapters, or the
                files cannot be loaded.
        """
        name = text_field(body, "lora_name")
        path = text_field(body, "lora_path")
        in_place = body.get("load_inplace", False)
        check_fields(body, {"lora_name", "lora_path", "load_inplace"})
        if not isinstance(in_place, bool):
            raise ApiError(400, "load_inplace must be true or false", param="load_inplace")
        if not re.fullmatch(MODEL_NAME, name) or len(name) > 256:
            raise ApiError(
                400, "lora_name must be 1 to 256 characters without spaces", param="lora_name"
            )
        served = self._context.adapters
        if name in self._context.model_names or (name in served and not in_place):
            raise ApiError(400, f"The name {show(name)} is taken", param="lora_name")
        if name not in served and len(served) >= MAX_ADAPTERS:
            raise ApiError(
                400,
                f"{MAX_ADAPTERS} adapters are loaded, which is the most; unload one",
                param="lora_name",
            )
        inside = directory_inside(
            self._directory, path, setting="lora_directory", param="lora_path"
        )
        before = served.get(name)
        # A number is never used again, since running requests keep the adapter of an old one.
        requested = LoRARequest(name, next(self._numbers), None if in_place else str(inside))
        if in_place and before is not None and before.lora_path is None:
            requested = before  # requests that are being prepared still find its number
        try:
            if in_place:
                digest = self._engine.adapters_for(requested).update_from(requested, inside)
            else:
                digest = self._engine.open_adapter(requested).adapter.digest
        except (CheckpointError, ModelNotFoundError) as error:
            raise ApiError(400, str(error), param="lora_path").quoting(body) from error
        if before != requested:
            self._forget(before)
        served[name] = requested
        return PlainTextResponse(
            f"Success: LoRA adapter '{name}' added successfully.",
            headers={"x-jaxpage-adapter-digest": digest},
        )

    def unload(self, body: dict[str, Any]) -> Response:
        """Unloads an adapter; running requests keep it.

        Raises:
            ApiError: A field is wrong, or there is no such adapter.
        """
        name = text_field(body, "lora_name")
        check_fields(body, {"lora_name", "lora_int_id"})
        requested = self._context.adapters.pop(name, None)
        if requested is None:
            raise ApiError(
                404,
                f"The LoRA adapter {show(name)} does not exist",
                param="lora_name",
                code="not_found",
            )
        self._forget(requested)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _forget(self, requested: LoRARequest | None) -> None:
        if requested is not None:
            self._engine.adapters_for(requested).forget(requested.lora_int_id)


def lora_routes(
    config: ServerConfig, engine: Engine, preparing: Preparing, context: ModelContext
) -> list[Route]:
    """Returns the routes that load and unload adapters; none without `lora_directory`.

    Their paths, /v1/load_lora_adapter and /v1/unload_lora_adapter, are those of vLLM.
    """
    if config.lora_directory is None:
        return []
    adapters = RuntimeAdapters(engine, context, Path(config.lora_directory))

    def answering(do: Callable[[dict[str, Any]], Response]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            check_origin(request.headers)
            check_is_json(request.headers)
            raw = await request.body()
            return await preparing.aside(lambda: do(parse_object(raw)))

        return answer

    return [
        Route("/v1/load_lora_adapter", answering(adapters.load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", answering(adapters.unload), methods=["POST"]),
    ]
