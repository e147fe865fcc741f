"""The sentences in which every error of the library is worded, as patterns for ``pytest.raises(match=...)``."""

THREE = r"(?s:Got .+\. Expected .+\. (?![a-z]+ )\S.*[.?…]$)"
"""What was given, what was expected and what to do, each a sentence: `layerwise.foundations.errors.describe`."""
NAMED = r"(?s:Unknown .+\. (Did you mean .+\? )?Available: .+[.…]$)"
"""A name that matches nothing, and what there is: `unknown` and `not_one_of` of that module."""
WORDED = f"({THREE}|{NAMED})"
