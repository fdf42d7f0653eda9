"""What several of these tests share."""

LIMIT = 12


def broken(result):
    """The oracles a result broke."""
    return {finding.oracle for finding in result.findings}
