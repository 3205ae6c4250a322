"""The data plane: ledger, staleness, stores, reward workers, dashboard. Runs without torch.

Roles reach the broker's process through client; the rooms say who else imports them.
"""
