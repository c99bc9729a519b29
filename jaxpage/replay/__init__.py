"""The event log of an engine, and replays of it."""
