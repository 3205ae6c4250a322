"""In place of IPython where it is not installed: SGLang imports it and does not use it here."""  # noqa: N999 the name that is imported
