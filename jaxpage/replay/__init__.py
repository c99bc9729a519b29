"""Logs the events of an engine, and replays the log.

The inner room `reading` answers questions about a log without an engine.
Names are loaded at first use, because an engine without a log needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.replay.differences import (
        Differs,  # says where a replay differs from its log
        StepAbandoned,  # leaves a step of the engine in the middle
        differ,  # raises `Differs` with the first field that is different
    )
    from jaxpage.replay.engine_opening import (
        open_engine,  # builds an engine, with a log and a prefix store if the settings ask for them
        open_in_memory,  # builds an engine for parameters in memory
    )
    from jaxpage.replay.event_log import (
        MAX_LINE_BYTES,  # is the length of the longest line
        check_new,  # checks that a log can be begun at a path
        encode_record,  # gives a record as a line
        write_log,  # writes records to a file
    )
    from jaxpage.replay.incidents import (
        IncidentRing,  # keeps the records of the last steps
        Incidents,  # writes the records of the last steps as logs into a directory
    )
    from jaxpage.replay.log_header import (
        engine_header,  # makes the first record of a log, which says what engine it is
        package_versions,  # gives the versions of Python and of packages that decide the numbers
    )
    from jaxpage.replay.recorder import (
        Record,  # is one JSON object of a log
        Recorder,  # turns events into records
    )
    from jaxpage.replay.replaying import (
        LoggedDrafts,  # proposes the drafts of a log
        Report,  # holds the result of a replay
        add_arrival,  # adds a recorded request to an engine
        replay,  # runs a log through a new engine, and compares
    )

__getattr__, __dir__ = open_door(__name__)
