"""From logits to tokens: parameters, the pipeline, and its counter-based noise."""
