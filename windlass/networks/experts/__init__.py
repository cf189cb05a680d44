"""Mixture of experts (MoE): a router, and experts of which each token has a few."""
