"""The data plane: ledger, staleness, stores, reward workers, dashboard. Runs without torch."""
