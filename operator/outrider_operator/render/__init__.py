"""The children of a SpeculativeModel, one pure function per kind: values in, the object to apply out."""
