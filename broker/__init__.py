"""The data plane: ledger, staleness, stores, reward workers, dashboard. Runs without torch.

Roles reach the broker's process through client; the packages name the other importers.
"""
