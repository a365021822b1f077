"""`make demo`: from nothing to a streamed speculative answer on a real cluster, told step by step."""
