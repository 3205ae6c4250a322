"""Where prompts come from: files, generated data sets, and how they are mixed."""
