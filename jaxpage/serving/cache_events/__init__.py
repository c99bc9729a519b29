"""Tells routers what the prefix cache holds."""
