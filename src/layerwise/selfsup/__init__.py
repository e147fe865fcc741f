"""Self-supervised representations: masked sparse coding and anchor vectors, Wu (2023), chapters 2 and 3, corrected."""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.selfsup.anchors.log_partition import log_bulk_partition as log_bulk_partition
    from layerwise.selfsup.anchors.measure import anchors as anchors
    from layerwise.selfsup.anchors.measure import anchors_of as anchors_of
    from layerwise.selfsup.anchors.report import AnchorReport as AnchorReport

import_when_used(__name__)
