"""Reads logs without an engine: what happened to a request, and where two logs differ."""

from jaxpage.replay.log_walk import (
    SequenceWalk,  # holds the state of one sequence of a log
    num_prompt_tokens,  # gives the length of a recorded prompt
)
from jaxpage.replay.reading.log_reading import (
    check_until,  # checks that a log has a step
    first_difference,  # finds the first difference of two logs
    header_differences,  # yields the differences between the headers of two logs
    request_lines,  # says what happened to one request
    state_lines,  # says how the requests and their blocks are after a step
)
from jaxpage.replay.reading.recorded_steps import (
    RecordedSteps,  # describes each step of a log by its records
)
from jaxpage.replay.reading.token_texts import (
    tokenizer_of_log,  # loads the tokenizer of a log
    with_texts,  # adds texts to the records of a log
)
