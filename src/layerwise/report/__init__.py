"""Records as pages: a static site with figures, claims, settings and the command that makes them again."""

from layerwise.report.site import write as write
