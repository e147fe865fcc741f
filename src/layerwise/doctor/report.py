"""`Report`: what `lw.doctor` returns."""

from dataclasses import dataclass

from layerwise.doctor.findings import Finding
from layerwise.doctor.measurements import Measurements


@dataclass(frozen=True)
class Report:
    measured: Measurements
    findings: tuple[Finding, ...]
    took: float
    seconds: float
