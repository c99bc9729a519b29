"""Measures of the code itself: how far a setting walks."""
