"""Makes requests of the prompts that callers give, and log probabilities of outputs."""

from jaxpage.engine.calls.prompts import (
    Messages,  # is the type of the messages of a conversation
    Prompt,  # holds one prompt, as a text or as token ids
    accept_sampling_params,  # lets a method take `sampling_params` for `params`
    chat_prompt,  # makes the prompt of a conversation by the chat template
    check_token_ids,  # refuses token ids that the model does not have
    normalise,  # gives the prompts of a caller as a list
    one_each,  # gives one set of parameters for each prompt
)
from jaxpage.engine.calls.scoring import (
    SCORING,  # are the parameters of requests for scores
    continuation_logprobs,  # gives the log probability of each token after a prompt
    pair_arguments,  # gives each prompt its continuation
    scores_of,  # makes scores of outputs
)
