"""The members of the family, one file each: class, rule and formula together."""
