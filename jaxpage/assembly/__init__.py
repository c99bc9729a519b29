"""From settings to an engine: what is decided, loaded and compiled before the first step. The engine never imports it."""
