"""Rows of verl's keys with their rules, a module for each topic; `table` has them all.

Imported by deploy.interop.verl.
"""
