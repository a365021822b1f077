"""Requests in, tokens out: scheduling, the step, and the process it runs in."""
