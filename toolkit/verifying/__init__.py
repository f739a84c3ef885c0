"""`toolkit verify`: whether the installed releases compute what one process computes."""
