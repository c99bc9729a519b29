"""Makes receipts of answers, and compares them with what an engine computes again.

A receipt says which weights, tokenizer, settings, kernels and request gave which tokens, with their
log probabilities to the last bit. This room knows arrays and texts alone: the driver describes its
engine and gives the outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.receipts.comparing import (
        Difference,  # is the first place in which an answer differs from its receipt
        Verification,  # says whether an answer was computed again, and why not
    )
    from jaxpage.receipts.hashing import (
        hash_tensors,  # hashes the tensors of a model, each by its name
        hash_text,  # gives the SHA-256 of a text
        hash_tokenizer,  # gives the hash of a tokenizer
        hash_weights,  # gives the hash of all tensors of their hashes
    )
    from jaxpage.receipts.making import (
        check_receiptable,  # refuses requests whose answers have no receipt
        make_receipt,  # makes the receipt of an answer
    )
    from jaxpage.receipts.receipt import (
        EngineFacts,  # says on what the bits of an engine depend
        Receipt,  # is a receipt that was read
        WeightFacts,  # has the hashes of weights
        parse_receipt,  # reads a receipt from an object
        read_receipt,  # reads a receipt from a file
        write_receipt,  # writes a receipt to a new file
    )
    from jaxpage.receipts.verifying import (
        NUM_OTHERS,  # is the number of the other requests in the batch of a verification
        Generate,  # is the type of what generates for prompts in one batch
        verify,  # computes an answer again, alone and among others
    )

__getattr__, __dir__ = open_door(__name__)
