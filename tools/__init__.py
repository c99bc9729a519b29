"""Programs around the engine: `python tools/NAME.py`, from any directory, where jaxpage is installed."""
