"""Contracts: what every layer rule, every operator and every approximation must keep, ours or yours.

Each is one call in a test, and raises an AssertionError that names the culprit and what differs:

| call | for |
|---|---|
| ``check_layer_rule(module, x)`` | a layer type of your own, registered with ``@lw.layer_rule`` |
| ``check_operator(op)`` | a `BlockOperator` |
| ``check_approximation(structure, case)`` | a structure of `lw.fisher`, on one of `layerwise.testing.CASES` |
"""

from layerwise.testing.contracts.approximation import check_approximation as check_approximation
from layerwise.testing.contracts.layer_rule import check_layer_rule as check_layer_rule
from layerwise.testing.contracts.operator import check_operator as check_operator
