"""Measurements, a file for each kind."""
