"""Replicas of a model, each with a share of the samples, whose gradients are averaged."""
