"""Holds the laboratory: studies of kernels, the scheduler, the engine and other programs.

The programs that users run by name are in `tools/` and take their parts from here. The tests are in
`tests/lab/`, which `.ci/nightly` runs; nothing of it is in the wheel.

    kernel_lab     checks and times the kernels on a GPU, and inspects what the compiler makes
    scheduler_lab  measures what the scheduler costs, and what it leaves of the pool unused
    paper          draws the figures of the PagedAttention paper
    peers          runs other engines for a comparison
    lm_eval        holds tasks for lm-eval, and compares its results with transformers
    demo_model     trains the packaged demo model and its drafters
"""
