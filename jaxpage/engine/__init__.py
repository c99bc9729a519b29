"""The hall: the only place where the host wing (memory, scheduling, decoding) and the device wing meet."""
