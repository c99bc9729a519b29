"""Holds the document's text about each figure: differences from the paper, and their reasons."""

from __future__ import annotations

INTRODUCTION = """\
# The PagedAttention paper, reproduced

The figures of [Kwon et al., *Efficient Memory Management for Large Language Model Serving with
PagedAttention*](https://arxiv.org/abs/2309.06180), with this project's scheduler and block manager. Nothing here ran
on a GPU. This page and its pictures are written by

```
{command}
```

- **Simulated**: the engine's own scheduler and block manager plan every step. A cost model says how long the step
  takes on the paper's GPUs, and tokens are dummies that end at the length that the trace has (`jaxpage/simulation/`).
  A test runs a trace through an engine and through the simulation: plans and block tables are identical.
- **Measured**: an engine with the demo model, or a kernel, ran on a CPU.
- **Computed**: arithmetic.

The systems before paging are policies of the same simulation, with the same traces, clock and costs.
*FasterTransformer* is a static batcher with room for 2,048 tokens for each request. *Orca* schedules by iterations
and reserves, from a buddy allocator, the longest sequence (Max), the output rounded up to a power of two (Pow2), or
the true length (Oracle).

What differs from the paper everywhere:

- The cost model derives the time of a step from the memory bandwidth and the arithmetic of the GPUs; two numbers, of
  the host, were fitted to OPT-13B in the paper's figure 13. All systems have the same costs, so memory and batching
  alone make the difference between them. Absolute rates are less certain than ratios.
- Lengths are drawn from distributions with the paper's means; no dataset is downloaded. The spread of ShareGPT's
  outputs follows from the paper's figure 2; that of its inputs, and of Alpaca, is a guess.
- {effort}
- A request that is unfinished at the end of its window counts with the time until then, which is too little: what
  lies above the knee of a curve is drawn too low.
- The paper prints no number for most curves: then the one next to ours was read off its plot (about ± 15 %). The
  *highest rate* is that at which a curve passes 0.5 s/token, in requests/s.
"""

NOTES = {
    "table 1": """
The weights and the bytes of a token are counted from the modules of `jaxpage/models/opt.py`, in float16. The memory
that is left for keys and values is the paper's, whose gigabytes are powers of two here, and rounded.
""",
    "2": """
OPT-13B, ShareGPT at 2 requests/s, means over the last three quarters of the window. As in the paper, *reserved* slots
will be used later, *internal fragmentation* was asked for and never will be, and what the buddy allocator adds by
rounding up counts as external. For jaxpage the last part is free blocks: a hundredth of the pool is left free when a
request is admitted.
""",
    "12": """
(a) to (c): ShareGPT, (d) to (f): Alpaca. The cost models of the 66B and 175B machines are derived and not fitted, and
too fast: absolute rates of all systems are above the paper's. (f): the ratio to Orca (Oracle) is the smallest, as in
the paper, because the pool is large and steps are bound by arithmetic and the host. (d), (e): what was read off the
paper's plot for FasterTransformer and Orca (Max) cannot be what its text describes. Seven requests at a time, each of
58 steps of 35 ms, are 3.5 requests/s, not 7.
""",
    "13": """
The runs of figure 2, and Alpaca at 30 requests/s. Orca (Max) has room for 7 requests of 2,048 slots each, and it is
always full. In (b) jaxpage is below the paper's 132.44: the pool is not full at this rate, so the number is the rate
times the time that a request takes (Little's law), and the cost model is faster than the paper's system beyond a
hundred sequences. That bar has no tolerance.
""",
    "14": """
OPT-13B, Alpaca. All samples of a request have the same length. Orca has a copy of the prompt, and of all else, for
each sequence; copies cost it nothing here, not even when beams replace each other. Which beams go on is replayed from
real searches of the demo model (figure 15). The paper says that the ratio to Orca (Oracle) grows from 1.3 (figure
12d) to 2.3 (beam search of 6). Here it grows less, since Orca's copies are free.
""",
    "15": """
Blocks saved by sharing / blocks without sharing, over time. *Decoded*: an engine with the demo model, 16 requests a
seed with the lengths of the dataset, prompts of at most 256 tokens and outputs of at most 255. The model wrote the
prompts itself. All samples of a request have the same length, as the paper's must have had. ShareGPT's outputs lose
more to the limit than its prompts do, so that samples share more of what they have than in the paper. *Simulated*:
the whole lengths; beams follow the ancestry of the decoded searches, over and over where one is longer.
""",
    "16": """
LLaMA-13B. The lengths of WMT16's sentences are guesses: Gamma distributions with means of 30 and 40 tokens. The
prefix is pinned: its blocks are computed once and shared, and the last one, which is partly filled, is copied when a
request writes to it.
""",
    "17": """
OPT-13B. Every prompt has 1,024 tokens, which the paper says of most; outputs are ShareGPT's, at most 1,024. The three
Orcas coincide because the buddy allocator rounds each of their reservations up to 2,048 slots. The paper's text says
twice the rate, its plot shows about 1.4 times.
""",
    "18": """
(a) is in shape only. The paper compares two GPU kernels. Here the same kernel, this project's in C++ for CPUs, reads
the heads of OPT-13B over blocks of 16 in any order, and over one block as long as the context, which is contiguous.
Differences of some percent are within the noise of a machine on which other programs run. (b) has the effect of memory
alone: what a step costs does not depend on the block size, so small blocks lose nothing, which they do on a GPU. Large
blocks are filled badly, and the short requests of Alpaca suffer most. The paper does not say its rates; ours are below
what blocks of 16 sustain.
""",
    "19": """
(a) The cost of swapping is fitted to the paper's figure, recomputation is the cost of a prompt. On a CPU host and device
are the same memory: swapping wins throughout, and the second panel says nothing of a bus. The paper's sentence that
recomputation is never more than 20 % above swapping contradicts its own figure if it is read literally, block size by
block size, and by this cost model it holds in small blocks only (second row). (b) ShareGPT at a rate at which requests
are preempted. End to end, swapping costs more in blocks of 1 and 4, and the two are alike from 16 on; above 64 the
unused slots of large blocks decide.
""",
}
