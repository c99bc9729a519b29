"""What host and device modules exchange about a step: requests, plans, results, edits, drafts and limits. Integers and numpy only."""
