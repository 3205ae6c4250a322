"""The page of several runs: their list, their curves, the settings and results that differ.

Everything is read from run folders, of finished runs and of running ones.
Imported by broker.dashboard and deploy.
"""
