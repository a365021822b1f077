"""The HTTP side: OpenAI API, streaming, admin port. Imports no torch."""
