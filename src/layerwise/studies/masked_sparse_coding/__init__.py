"""Chapter 2 of Wu (2023): dictionaries with more atoms than the truth, learned with and without hidden coordinates."""
