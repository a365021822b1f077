"""Outrider's runtime: a continuous-batching inference server in torch whose normal case is speculation."""
