"""Answers files of requests in OpenAI's batch format, for `jaxpage run-batch` and `/v1/batches`.

lines        reads a line of the input and writes a line of the output
output_file  appends answers to a file, which a later run continues
ordering     reads the input in windows, each in an order in which prompts share prefixes
in_process   sends requests to the routes of the server in this process
running      answers all lines of a file
run_batch    does so with an engine of its own
"""
