"""OpenAI's wire format as pure functions: request bodies in, jobs for the engine out; outputs of the engine in, response bodies out."""
