"""Reference values, tiny models and contracts: for the tests of this library and of those built on it."""

from layerwise.testing import oracles as oracles
from layerwise.testing.cases import CASES as CASES
from layerwise.testing.cases import Case as Case
from layerwise.testing.cases import case as case
from layerwise.testing.cases import select as select
from layerwise.testing.contracts import check_approximation as check_approximation
from layerwise.testing.contracts import check_layer_rule as check_layer_rule
from layerwise.testing.contracts import check_operator as check_operator
