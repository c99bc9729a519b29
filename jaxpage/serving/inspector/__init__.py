"""The page: a playground, and a view of the KV blocks, the queue and the steps of a running engine or of a recorded event log."""
