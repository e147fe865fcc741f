"""Experiments that go on from the papers: samples that features need, networks that are not linear, real images."""
