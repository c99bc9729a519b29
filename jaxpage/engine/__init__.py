"""Runs the engine's steps; only here do the host rooms and the device rooms meet.

Other rooms take:

    Engine                 calls the scheduler and the runner in turn
    EngineParts            names the parts of an engine that may be replaced
    BatchBuilder           builds the batches of plans
    Batch                  holds a step that is ready for the device
    Runner                 runs batches by the table of executables
    Adapters               keeps the LoRA adapters that are read, and those in slots on the device
    directory_of           gives the directory of an adapter
    CheckedParams          holds parameters that fit the model
    NamedAdapter           holds an adapter that was read and fits the model
    PreparedRequest        holds a request that can be added to the engine
    Reporter               reports on one request
    StreamDetokenizer      makes the text of one sequence as its tokens come
    NoText                 gives no text, for a model without a tokenizer
    token_bytes            gives the bytes that a token stands for
    Prompt                 holds one prompt, as a text or as token ids
    Messages               are the messages of a conversation
    chat_prompt            makes the prompt of a conversation by the chat template
    normalise              gives the prompts of a caller as a list
    one_each               gives one set of parameters for each prompt
    accept_sampling_params           lets a method take `sampling_params` for `params`
    check_token_ids        refuses token ids that the model does not have
    SCORING                are the parameters of requests for scores
    pair_arguments         gives each prompt its continuation
    scores_of              makes scores of outputs
    continuation_logprobs  gives the log probability of each token after a prompt
    reranker_of            says how a model ranks documents
    TextEmbedding          says how texts become vectors
    check_dimensions       checks how many dimensions a call asks for
    YesNo, ByVectors       rank by the probabilities of two tokens; by vectors
    RerankMethod           names these ways
    check_documents        gives the documents of a caller as a list
    rank                   puts documents in the order of their scores
"""

from jaxpage.engine.adapters import Adapters, directory_of
from jaxpage.engine.admission import CheckedParams, NamedAdapter, PreparedRequest
from jaxpage.engine.batch_builder import Batch, BatchBuilder
from jaxpage.engine.embedding import TextEmbedding, check_dimensions
from jaxpage.engine.engine import Engine, EngineParts
from jaxpage.engine.prompts import (
    Messages,
    Prompt,
    accept_sampling_params,
    chat_prompt,
    check_token_ids,
    normalise,
    one_each,
)
from jaxpage.engine.reporting import Reporter
from jaxpage.engine.reranking import (
    ByVectors,
    RerankMethod,
    YesNo,
    check_documents,
    rank,
    reranker_of,
)
from jaxpage.engine.runner import Runner
from jaxpage.engine.scoring import SCORING, continuation_logprobs, pair_arguments, scores_of
from jaxpage.engine.text import NoText, StreamDetokenizer, token_bytes

__all__ = [
    "SCORING",
    "Adapters",
    "Batch",
    "BatchBuilder",
    "ByVectors",
    "CheckedParams",
    "Engine",
    "EngineParts",
    "Messages",
    "NamedAdapter",
    "NoText",
    "PreparedRequest",
    "Prompt",
    "Reporter",
    "RerankMethod",
    "Runner",
    "StreamDetokenizer",
    "TextEmbedding",
    "YesNo",
    "accept_sampling_params",
    "chat_prompt",
    "check_dimensions",
    "check_documents",
    "check_token_ids",
    "continuation_logprobs",
    "directory_of",
    "normalise",
    "one_each",
    "pair_arguments",
    "rank",
    "reranker_of",
    "scores_of",
    "token_bytes",
]
