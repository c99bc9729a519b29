"""Full KV blocks as files, so that prefixes survive a restart."""
