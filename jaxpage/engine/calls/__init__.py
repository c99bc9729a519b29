"""Makes requests of what callers give, such as prompts and documents, and scores of outputs."""

from jaxpage.engine.calls.embedding import (
    TextEmbedding,  # says how texts become vectors
    check_dimensions,  # checks how many dimensions a call asks for
)
from jaxpage.engine.calls.prompts import (
    Messages,  # is the type of the messages of a conversation
    Prompt,  # holds one prompt, as a text or as token ids
    accept_sampling_params,  # lets a method take `sampling_params` for `params`
    chat_prompt,  # makes the prompt of a conversation by the chat template
    check_token_ids,  # refuses token ids that the model does not have
    normalise,  # gives the prompts of a caller as a list
    one_each,  # gives one set of parameters for each prompt
)
from jaxpage.engine.calls.reranking import (
    ByPairs,  # ranks by the scores of a cross-encoder
    ByVectors,  # ranks by vectors
    RerankMethod,  # names the ways of ranking
    YesNo,  # ranks by the probabilities of two tokens
    check_documents,  # gives the documents of a caller as a list
    rank,  # puts documents in the order of their scores
    reranker_of,  # says how a model ranks documents
)
from jaxpage.engine.calls.scoring import (
    SCORING,  # are the parameters of requests for scores
    continuation_logprobs,  # gives the log probability of each token after a prompt
    pair_arguments,  # gives each prompt its continuation
    scores_of,  # makes scores of outputs
)
