"""The OpenAI-compatible routes of the engine's server."""
