"""Programs around the engine. Run them from the root of the repository: `PYTHONPATH=. python tools/gpu_check.py`."""
