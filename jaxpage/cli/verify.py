"""Runs `jaxpage verify`, which computes the answer of a receipt again."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jaxpage.cli.resolving import engine, resolve_settings
from jaxpage.errors import JaxpageError, ReceiptError
from jaxpage.receipts import NUM_OTHERS, Receipt, Verification, read_receipt
from jaxpage.settings.argument_checks import count, show
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sources import BUILT_IN

EQUAL = 0
DIFFERENT = 1
UNKNOWN = 3  # 2 is the status of wrong use
_STATUS = {"equal": EQUAL, "different": DIFFERENT, "unknown": UNKNOWN}


def verify(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage verify FILE [MODEL]`.

    Args:
        arguments: The command line.

    Returns:
        The exit status: 0 if the answer is equal to the last bit, 1 if it is not, and 3 if this
        machine cannot tell.

    Raises:
        ReceiptError: The file holds no receipt.
    """
    receipt = read_receipt(arguments.file)
    settings = resolve_settings(arguments)
    is_named = settings.origins["model"] != BUILT_IN
    has_width = settings.origins["max_num_seqs"] != BUILT_IN
    try:
        verdict = _verify(receipt, settings.config, arguments, is_named, has_width)
    # A file that is no receipt is wrong use, with the status 2, and no verdict.
    except ReceiptError:
        raise
    except KeyboardInterrupt:
        verdict = Verification("unknown", ("interrupted",))
    except JaxpageError as error:
        verdict = Verification("unknown", (str(error),))
    except Exception as error:  # no failure may read as "different"
        verdict = Verification("unknown", (f"{type(error).__name__}: {error}",))
    print(json.dumps(verdict.body()) if arguments.json else _describe(verdict))
    return _STATUS[verdict.result]


def _verify(
    receipt: Receipt,
    config: EngineConfig,
    arguments: argparse.Namespace,
    is_named: bool,
    has_width: bool,
) -> Verification:
    from jaxpage.checkpoints.finding import local_model

    changes = _settings_of(receipt)
    if not is_named:
        if local_model(receipt.model) is None:
            return Verification(
                "unknown",
                (
                    f"the receipt is of the model {show(receipt.model)}, which is not on this "
                    "machine: name it after the file",
                ),
            )
        changes["model"] = receipt.model
    if not has_width:
        params = receipt.request.params
        # A receipt is somebody else's file, in which these may be missing, or true, which is an
        # int.
        widths = [params.get("n"), params.get("best_of"), NUM_OTHERS + 1]
        changes["max_num_seqs"] = max(width for width in widths if type(width) is int)
    with engine(config.replace(**changes), quiet=arguments.quiet, verbose=arguments.verbose) as llm:
        return llm.verify(receipt.body())


def _settings_of(receipt: Receipt) -> dict[str, Any]:
    """Returns the settings that give an engine the bits of the receipt's."""
    facts = receipt.engine
    return {
        "dtype": facts.dtype,
        "kv_cache_dtype": facts.kv_cache_dtype,
        "quantization": facts.quantization,
        "attention_backend": facts.attention_backend,
        "batch_invariant": facts.batch_invariant,
        "tensor_parallel_reduction": facts.reduction.partition(",")[0].partition(" ")[0] or "auto",
    }


def _describe(verdict: Verification) -> str:
    if verdict.result == "equal":
        return (
            f"Equal: {count(verdict.num_tokens, 'token')} and all log probabilities have the bits "
            f"of the receipt, computed alone and in a batch with {NUM_OTHERS} other requests"
        )
    begin = "Different" if verdict.result == "different" else "This machine cannot tell"
    return "\n".join(f"{begin}: {reason}" for reason in verdict.reasons)
