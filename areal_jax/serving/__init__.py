"""Serving a policy: one sampler behind JetStream's gRPC protocol and an OpenAI-compatible HTTP endpoint."""
