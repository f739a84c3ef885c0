"""What tests read from the checks of a certificate."""


def broken(checks):
    return {name for name, check in checks.items() if check["answer"] == "broken"}
