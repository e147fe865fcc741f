"""`lw.doctor`: what holds training back, layer by layer, with the evidence and what would help.

`examination.py` goes over the data and calls `measure/`, which makes `measurements.py`'s numbers; `rules/` reads them
and makes `findings.py`'s sentences; `report.py` and `page.py` show both.
"""
