"""Causes: from the log of a failed run, of any script, to the cause, its lines and its fix."""
