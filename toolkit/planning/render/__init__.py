"""A plan for eyes and for programs: tables, bars, figures, HTML and JSON."""
