.DEFAULT_GOAL := help
PY := .venv/bin/python
HERMETIC := not integration and not redis and not e2e

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'
setup:  ## make .venv with what a CPU machine needs, pinned
	@./deploy/setup.sh
quickstart: setup  ## teach a tiny policy to add, with every role real
	@$(PY) -m deploy.main quickstart
quickstart-null: setup  ## the same without learning: the evaluation must not move
	@$(PY) -m deploy.main quickstart run.name=quickstart-null learner.lr=0
format:  ## rewrite files to the house style
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
lint:  ## style, types and import rules; changes nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo
unit: ## hermetic tests, under a minute; run before every commit
	$(PY) -m pytest -q -m '$(HERMETIC)'
test-integration:  ## real processes, Redis, SGLang, Megatron, and the whole loop
	$(PY) -m pytest -q -m 'integration or redis or e2e'
test: setup lint unit test-integration  ## everything: what the README names and CI runs
.PHONY: help setup quickstart quickstart-null format lint unit test-integration test
