"""Pure laws of engines, learner and publishes: seconds from sizes and a GPU's data sheet.

Imported by deploy.commands and deploy.predict.
"""
