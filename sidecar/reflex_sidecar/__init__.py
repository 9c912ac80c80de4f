"""OpenAI-compatible HTTP in front of a Reflex engine: a process of its own that speaks protocol.md to the engine."""

__version__ = "0.1.0"
