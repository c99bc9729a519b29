"""Several hosts that serve one model: each has a process with the same engine, and rank 0 tells the others what to do to theirs."""
