"""Runs the engine's steps; only here do the host packages and the device packages meet."""
