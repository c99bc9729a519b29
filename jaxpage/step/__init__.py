"""What the modules of host and device say to each other about a step: requests, plans, results, edits, drafts and limits. Integers and numpy only."""
