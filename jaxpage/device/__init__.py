"""The device wing's machine room: pages, step functions, buckets and the table of compiled executables. Never sees a request."""
