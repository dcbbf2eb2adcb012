"""Sampling trajectories: a JetStream engine and the interruptible driver above it."""
