"""Translates other APIs into OpenAI's chats and completions."""
