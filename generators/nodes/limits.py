"""What both ends of the link between the hosts of an engine keep to."""

LONGEST_GAP_S = 5.0  # longer gaps are time in which this process did not run either
LINGER_MS = 1_000  # for what was sent last to leave
MOST_TEXT = 2_000  # characters of a reason
