"""Outrider's operator: reconciles SpeculativeModel objects into pods that serve with speculative decoding."""
