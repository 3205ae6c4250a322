"""Experiment trackers for a run's curves: one adapter per tool, chosen by name.

A tool's library is imported when its adapter starts.
Imported by broker.history, broker.report, broker.service, broker.startup and
deploy.predict.simulate.
"""
