"""Sources of prompts (files, generated data sets), and their mixing."""
