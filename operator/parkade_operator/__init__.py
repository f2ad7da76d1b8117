"""Kubernetes operator of Parkade."""
