"""Drafting and verification: proposers, the one verification rule, draft length."""
