"""The parts of `tools/train_demo_model.py`: what the demo model reads, its tokenizer, its training, its files and card."""
