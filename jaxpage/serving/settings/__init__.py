"""Declares the settings of the server, and reads them and its keys."""
