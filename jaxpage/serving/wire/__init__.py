"""OpenAI's wire format as pure functions: request bodies in, prompts for the engine out; outputs of the engine in, response bodies out."""
