"""The data plane: ledger, staleness, stores, reward workers, dashboard. Runs without torch.

Other packages come in through client, config, data, rewards.sdk and the reward worker's pool.
"""
