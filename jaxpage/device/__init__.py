"""The device's side of a step: pages, step functions, buckets and the table of compiled executables. Never sees a request."""
