"""Logs the events of an engine, and replays the log.

Other rooms take:

    open_engine         builds an engine, with a log and a prefix store if the settings ask for them
    open_in_memory      builds one for parameters in memory
    Recorder            turns events into records
    Record              is one JSON object of a log
    engine_header       makes the first record of a log, which says what engine it is
    package_versions    gives the versions of Python and of the packages that decide the numbers
    encode_record       gives a record as a line
    MAX_LINE_BYTES      is the length of the longest line
    write_log           writes records to a file
    check_new           checks that a log can be begun at a path
    IncidentRing        keeps the records of the last steps
    Incidents           writes them as logs into a directory
    replay              runs a log through a new engine, and compares
    Report              holds the result
    LoggedDrafts        proposes the drafts of a log
    add_arrival         adds a recorded request to an engine
    differ              raises `Differs` with the first field that is different
    Leave               leaves a step of the engine in the middle
    check_until         checks that a log has a step
    request_lines       says what happened to one request
    state_lines         says how the requests and their blocks are after a step
    first_difference    finds the first difference of two logs
    header_differences  yields the differences between their headers
    RecordedSteps       describes each step of a log by its records
    SequenceWalk        holds the state of one sequence of a log
    num_prompt_tokens   gives the length of a recorded request's prompt
    tokenizer_of_log    loads the tokenizer of a log
    with_texts          adds texts to the records of a log
"""

from jaxpage.replay.differences import Differs, Leave, differ
from jaxpage.replay.engine_opening import open_engine, open_in_memory
from jaxpage.replay.event_log import MAX_LINE_BYTES, check_new, encode_record, write_log
from jaxpage.replay.incidents import IncidentRing, Incidents
from jaxpage.replay.log_header import engine_header, package_versions
from jaxpage.replay.log_walk import SequenceWalk, num_prompt_tokens
from jaxpage.replay.looking import (
    check_until,
    first_difference,
    header_differences,
    request_lines,
    state_lines,
)
from jaxpage.replay.recorded_steps import RecordedSteps
from jaxpage.replay.recorder import Record, Recorder
from jaxpage.replay.replaying import LoggedDrafts, Report, add_arrival, replay
from jaxpage.replay.token_texts import tokenizer_of_log, with_texts

__all__ = [
    "MAX_LINE_BYTES",
    "Differs",
    "IncidentRing",
    "Incidents",
    "Leave",
    "LoggedDrafts",
    "Record",
    "RecordedSteps",
    "Recorder",
    "Report",
    "SequenceWalk",
    "add_arrival",
    "check_new",
    "check_until",
    "differ",
    "encode_record",
    "engine_header",
    "first_difference",
    "header_differences",
    "num_prompt_tokens",
    "open_engine",
    "open_in_memory",
    "package_versions",
    "replay",
    "request_lines",
    "state_lines",
    "tokenizer_of_log",
    "with_texts",
    "write_log",
]
