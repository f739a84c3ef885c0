"""What tests read from the checks of a certificate."""

import pytest


def broken(checks):
    return {name for name, check in checks.items() if check["answer"] == "broken"}


def tiered(cases, swept):
    """Return cases as parameters; those whose checks another case breaks too are a sweep."""
    return [
        pytest.param(case, marks=[pytest.mark.sweep] * (case in swept), id=named(case))
        for case in cases
    ]


def named(case):
    return case if isinstance(case, str) else " ".join(case)
