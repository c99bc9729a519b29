"""Serves several models from one process: each is loaded when a request names it.

A table decides which models are in memory. Each of them has a driver and a `Server` of its own, as
a server of one model has:

    request ─▶ Switchboard ── lease(name) ─▶ ModelTable ─▶ ServedModel: driver, Server, adapters
               reads `model`                 loads, unloads, puts to sleep, wakes

The reading order is `models_file.py`, `table.py`, `served_model.py`, `shown_models.py`,
`switchboard.py`, `all_models.py` and `starting.py`.
"""
