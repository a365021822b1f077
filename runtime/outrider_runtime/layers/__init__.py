"""The layers models are made of, each taking a flattened ragged batch."""
