"""Programs and requirements of setup.sh, which run before anything is installed."""
