"""Logs the events of an engine, and replays the log."""
