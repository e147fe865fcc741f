"""Experiments of the papers, as declarations: cells, claims and figures; and the runner."""
