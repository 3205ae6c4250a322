"""Limits for both ends of the link between the hosts of an engine."""

LONGEST_GAP_S = 5.0  # in longer gaps this process did not run either
LINGER_MS = 1_000  # time for the last messages to leave
MOST_TEXT = 2_000  # characters of a reason
