"""Benchmarks, generators and checks that are not part of the package."""
