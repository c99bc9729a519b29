"""The figures of the PagedAttention paper, drawn by the engine's scheduler and block manager: `tools/reproduce_paper.py`."""
