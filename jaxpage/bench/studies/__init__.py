"""Looks into what makes an engine fast or slow, one question each.

roofline.py      how near steps come to what the machine can do
start_times.py   the seconds from the start of a process to its first token
quantization.py  weights of few bits, and kv_dtype.py keys and values of eight
speculation.py   speculative decoding against none, and against an oracle
shape_times.py   the steps of an engine, by their shapes, for simulations
"""
