"""The SpeculativeModel API: what users type and read. `crds/` is generated from it."""
