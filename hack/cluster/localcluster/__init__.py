"""A real one-node Kubernetes cluster, and its control plane alone, from this repository."""
