"""From a prompt to token ids and back, and chat templates. Pure, without SGLang or transformers.

Imported by deploy.preflight.check, deploy.commands and generators.
"""
