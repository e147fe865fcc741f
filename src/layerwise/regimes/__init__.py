"""Lazy or feature learning: the linear limit of a network, and how far a training is from it."""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.regimes.cscores import CScores as CScores
    from layerwise.regimes.cscores import estimate_cscores as estimate_cscores
    from layerwise.regimes.equal_progress import EqualProgress as EqualProgress
    from layerwise.regimes.equal_progress import at_equal_progress as at_equal_progress
    from layerwise.regimes.groups import NoisyLabels as NoisyLabels
    from layerwise.regimes.groups import Spurious as Spurious
    from layerwise.regimes.groups import balanced as balanced
    from layerwise.regimes.groups import deciles as deciles
    from layerwise.regimes.groups import label_noise as label_noise
    from layerwise.regimes.groups import with_spurious as with_spurious
    from layerwise.regimes.linearity import kernel_alignment as kernel_alignment
    from layerwise.regimes.linearity import relu_signs as relu_signs
    from layerwise.regimes.linearity import representation as representation
    from layerwise.regimes.linearity import representation_alignment as representation_alignment
    from layerwise.regimes.linearity import sign_similarity as sign_similarity
    from layerwise.regimes.linearized import Linearized as Linearized
    from layerwise.regimes.rescaled import rescaled as rescaled
    from layerwise.regimes.snapshots import Snapshots as Snapshots
    from layerwise.regimes.tracker import Tracker as Tracker
    from layerwise.regimes.yin_yang import YinYang as YinYang
    from layerwise.regimes.yin_yang import yin_yang as yin_yang
    from layerwise.regimes.yin_yang import yin_yang_grid as yin_yang_grid
    from layerwise.regimes.yin_yang import yin_yang_labels as yin_yang_labels

import_when_used(__name__)
