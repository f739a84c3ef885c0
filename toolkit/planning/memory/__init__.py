"""Memory of a rank: model states to the byte, and the rest term by term."""
