"""Reference values, tiny models and contracts: for the tests of this library and of those built on it."""
