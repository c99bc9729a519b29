"""Measures a server as its clients see it: `jaxpage bench serve`, in serve.py."""
