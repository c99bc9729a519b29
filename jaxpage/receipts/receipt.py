"""Defines the format of receipts, and reads and writes them.

A receipt comes from a stranger. It is read strictly and within bounds: a field that is missing,
unknown or of another type is refused.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxpage.errors import ReceiptError
from jaxpage.receipts.hashing import hash_text
from jaxpage.settings.argument_checks import INT32_MAX, show

FORMAT = "jaxpage-receipt"
VERSION = 1
MAX_FILE_BYTES = 32 * 2**20  # a million tokens with their log probabilities take 20 MB
MAX_PROBLEMS = 3  # the most that one error tells

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
# Without `fail_fast` a million wrong items would make a million errors.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
# The bits of a float32, the most significant digit first.
Bits = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class _ReceiptPart(BaseModel):
    """A part of a receipt."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class EngineFacts(_ReceiptPart):
    """Says on what the bits of an engine's answers depend, besides its weights.

    Attributes:
        jaxpage: The version of jaxpage.
        code: The hash of the source code that steps are compiled from.
        jax: The version of jax.
        jaxlib: The version of jaxlib, which has XLA.
        llguidance: The version of the library of grammars; None for a request without one.
        flags: What the environment tells XLA that may change numbers; empty for nothing.
        device: The platform and the kind of the device.
        architecture: The architecture of the machine.
        instructions: The instructions of the processor that the kernels for CPUs multiply by.
        processor: The name of the processor. Another one with the same instructions may have the
            same bits.
        attention_backend: The setting of this name.
        attention: The kernel sets that compute attention.
        batch_invariant: True if kernels of a GPU added up in orders that do not depend on the batch
            (the setting of this name).
        dtype: The type of weights and activations.
        kv_cache_dtype: The type of keys and values; "auto" for `dtype`.
        quantization: The setting of this name.
        reduction: The order of sums over the parts of a divided model; empty for a whole one.
        config: The hash of what the model's config.json says.
        tokenizer: The hash of the tokenizer; None if there is none.
        eos_token_ids: The ids that end a text.
    """

    jaxpage: Text
    code: Hash
    jax: Text
    jaxlib: Text
    llguidance: Text | None
    flags: Text
    device: Text
    architecture: Text
    instructions: Text
    processor: Text
    attention_backend: Text
    attention: Text
    batch_invariant: bool
    dtype: Text
    kv_cache_dtype: Text
    quantization: Text | None
    reduction: Text
    config: Hash
    tokenizer: Hash | None
    eos_token_ids: TokenIds


class WeightFacts(_ReceiptPart):
    """Has the hashes of a model's weights.

    Attributes:
        hash: The hash of all tensors; see `hash_weights`.
        tensors: The hash of each tensor by its name in the checkpoint; None where they are left
            out.
    """

    hash: Hash
    tensors: Annotated[dict[Text, Hash], Field(max_length=2**17)] | None


class RequestFacts(_ReceiptPart):
    """Has what was asked.

    Attributes:
        prompt_token_ids: The tokens of the prompt.
        seed: The seed of the noise in decimal digits; it was drawn if the request had none.
        params: The parameters of sampling that can change an answer, by name.
    """

    prompt_token_ids: Annotated[TokenIds, Field(min_length=1)]
    seed: Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,19})$")]
    params: dict[Text, Any]


class AnswerFacts(_ReceiptPart):
    """Has what was answered, for one of the outputs.

    Attributes:
        text: The text.
        token_ids: The tokens.
        logprobs: The bits of each token's log probability.
        finish_reason: What ended the output.
        stop_reason: The stop string or the token id that ended it; None for the length and for an
            end-of-sequence token.
    """

    text: str
    token_ids: TokenIds
    logprobs: Annotated[list[Bits], Field(fail_fast=True, max_length=2**20)]
    finish_reason: Literal["stop", "length"]
    stop_reason: TokenId | str | None


class Receipt(_ReceiptPart):
    """Is a receipt.

    Attributes:
        format: The name of the format.
        version: Its version.
        model: The name by which the model was opened or served.
        engine: What the bits depend on.
        weights: The hashes of the weights.
        request: What was asked.
        outputs: What was answered.
        checksum: The hash of all other fields; see `checksum_of`. It shows damage, and is no
            signature.
    """

    format: Literal["jaxpage-receipt"]
    version: Literal[1]
    model: Text
    engine: EngineFacts
    weights: WeightFacts
    request: RequestFacts
    outputs: Annotated[list[AnswerFacts], Field(min_length=1, max_length=16384)]
    checksum: Hash

    def body(self) -> dict[str, Any]:
        """Returns the receipt as a JSON object."""
        return self.model_dump()


def checksum_of(body: dict[str, Any]) -> str:
    """Returns the hash of a receipt's other fields.

    It is that of compact JSON with sorted keys, in which 1.0 is 1: programs that read and write
    JSON may do the same.
    """
    fields = {name: value for name, value in body.items() if name != "checksum"}
    return hash_text(json.dumps(_plain(fields), sort_keys=True, separators=(",", ":")))


def _plain(value: Any) -> Any:
    """Returns a JSON value in which whole numbers are integers."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def bits_of(logprob: float) -> str:
    """Returns the bits of a float32 in hexadecimal digits."""
    return struct.pack(">f", logprob).hex()


def logprob_of(bits: str) -> float:
    """Returns the number that these bits are."""
    return float(struct.unpack(">f", bytes.fromhex(bits))[0])


def parse_receipt(body: Any) -> Receipt:
    """Returns the receipt that a JSON object is.

    Raises:
        ReceiptError: It is none, or has another version.
    """
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ReceiptError(f'this is no receipt: it has no field "format" with {FORMAT!r}')
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise ReceiptError(
            f"the receipt has version {show(body.get('version'))}, and this jaxpage reads {VERSION}"
        )
    try:
        receipt = Receipt.model_validate(body)
    except (ValidationError, RecursionError) as error:
        _refuse(error)
    for index, output in enumerate(receipt.outputs):
        if len(output.token_ids) != len(output.logprobs):
            raise ReceiptError(
                f"outputs.{index} of the receipt has {len(output.token_ids)} tokens and "
                f"{len(output.logprobs)} log probabilities"
            )
    return receipt


def _refuse(error: ValidationError | RecursionError) -> NoReturn:
    if isinstance(error, RecursionError):
        raise ReceiptError("the receipt is nested too deeply") from None
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    texts = [
        f"{'.'.join(map(str, problem['loc']))[:200]}: {problem['msg']}"
        for problem in problems[:MAX_PROBLEMS]
    ]
    more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
    raise ReceiptError(f"the receipt cannot be read: {'; '.join(texts)}{more}") from None


def read_receipt(path: str | os.PathLike[str]) -> Receipt:
    """Returns the receipt in a file.

    Raises:
        ReceiptError: There is no such file, it is too large, or it holds no receipt.
    """
    try:
        if not Path(path).is_file():
            raise ReceiptError(f"there is no file {os.fspath(path)!r}")
        with open(path, "rb") as file:
            contents = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ReceiptError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from None
    if len(contents) > MAX_FILE_BYTES:
        raise ReceiptError(
            f"{os.fspath(path)!r} has more than {MAX_FILE_BYTES} bytes, which no receipt has"
        )
    try:
        body = json.loads(
            contents, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer
        )
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"{os.fspath(path)!r} is no JSON: {str(error)[:200]}") from None
    return parse_receipt(body)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same field twice")
    return fields


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _integer(digits: str) -> int:
    # A seed of 64 bits has 20 digits; Python takes quadratic time for a number of very many.
    if len(digits) > 20:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def write_receipt(path: str | os.PathLike[str], receipt: dict[str, Any]) -> None:
    """Writes a receipt to a new file.

    Raises:
        OSError: The file exists, or cannot be written.
    """
    with open(path, "x", encoding="utf-8") as file:
        json.dump(receipt, file, indent=1)
        file.write("\n")
