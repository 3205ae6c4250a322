"""The live page and the metrics endpoint, served by the broker.

Reads snapshots that the report makes; no request of it changes the run.
Imported by broker.service and deploy.
"""
