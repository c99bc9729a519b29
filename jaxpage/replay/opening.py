"""An engine as the front doors open it: with its event log, if the settings ask for one."""

from __future__ import annotations

from typing import Any

from jaxpage.engine.build import Built, build_engine
from jaxpage.replay.event_log import EventLog, check_new
from jaxpage.replay.log_header import header
from jaxpage.settings.engine_config import EngineConfig


def open_engine(config: EngineConfig, **options: Any) -> Built:
    """`build_engine`, and a log of its events. Raises ConfigError before anything is loaded if the log's file is there already."""
    if config.event_log is not None:
        check_new(config.event_log)
    built = build_engine(config, **options)
    if config.event_log is not None:
        built.engine.events = EventLog(config.event_log, header(config, built.engine, built.spec))
    return built
