"""Naive twins: slow, obvious reference implementations written from the specifications alone (test oracles)."""
