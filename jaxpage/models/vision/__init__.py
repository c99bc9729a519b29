"""Holds the encoders of pictures, a page for each lineage.

A page has a family, which is the attribute `Vision` of the family of text models, and the reader of
its `vision_config`. What pages have in common is in `models.parts.vision_tower`.
"""
