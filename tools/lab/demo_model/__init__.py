"""Holds the parts of `tools/train_demo_model.py`.

They are the demo model's corpus, tokenizer, training, files and card, and its drafters.
"""
