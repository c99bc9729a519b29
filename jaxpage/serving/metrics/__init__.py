"""Watches the server: metrics, spans, logs, profiles, and the steps before something went wrong."""
