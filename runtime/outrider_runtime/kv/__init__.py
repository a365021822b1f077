"""The paged KV cache: blocks, who refers to them, and which prefixes they hold."""
