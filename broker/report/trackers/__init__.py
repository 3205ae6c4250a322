"""Where a run's curves go besides the page: one adapter per tool, chosen by name."""
