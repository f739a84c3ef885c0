"""What a rank holds: model states to the byte, and the rest term by term."""
