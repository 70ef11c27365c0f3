# `make help` lists the targets. Everything runs in .venv, which scripts/setup makes from the lock files;
# when it already fits them, that costs a few hundredths of a second.

BIN := .venv/bin
# Counting branches makes a test twice as slow: only these are run with it, which together cover domain/.
REACTOR_TESTS = $(wildcard tests/unit/reactor/test_*.py tests/unit/reactor/*/test_*.py)
DOMAIN_TESTS = tests/unit/domain $(foreach name,block_copies blocks engines lease_transitions leases node_liveness reruns, \
	tests/unit/reactor/test_$(name).py) $(foreach name,lifecycle pull_workers worker_checks,tests/unit/reactor/workers/test_$(name).py)
OTHER_UNIT_TESTS = $(filter-out tests/unit/domain tests/unit/reactor %__pycache__,$(patsubst %/,%,$(wildcard tests/unit/*/))) \
	$(wildcard tests/unit/test_*.py) $(filter-out $(DOMAIN_TESTS),$(REACTOR_TESTS)) tests/contract
REAL_TESTS = tests/lab tests/e2e $(wildcard tests/test_*.py) tests/component
SLOW_UNIT_TESTS = $(shell grep -rl --include='test_*.py' pytest.mark.slow tests/unit tests/contract)
ALONE_TESTS = $(shell grep -rl --include='test_*.py' pytest.mark.alone $(REAL_TESTS))
FAST = -p no:schemathesis -m fast
# In the order of tests/support/run_order.py.
ORDERED = --dist loadscope --no-loadscope-reorder -p no:schemathesis
PARALLEL = -n $(TEST_WORKERS) $(ORDERED)
TEST_WORKERS ?= 6
CHECKED = $(wildcard src tests bench scripts examples)
PYTEST_ARGS ?=
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header --no-annotate $(LOCK_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup ray check format test test-fast test-real test-component test-e2e test-lab test-ray system-packages chaos bench worker-image demo lock clean
.NOTPARALLEL:

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-16s %s\n' "$$name" "$$text"; done

setup: ## make or refresh .venv with everything for development
	@scripts/setup dev

ray: ## add Ray to .venv, for the control plane and for `grid cluster install --ray`
	@scripts/setup ray

check: setup ## format, lint, types, layers, house rules: what CI asks first
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy --num-workers 2 $(CHECKED) || { test $$? -eq 2 && $(BIN)/mypy $(CHECKED); }  # 2: its workers were not up in time
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python scripts/check_house_rules.py
	$(BIN)/python scripts/generate_client.py --check

format: setup ## let ruff write the format, and fix what it can
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

test: test-fast test-real ## the whole test suite, the fast part first

test-fast: setup ## unit and contract tests but the slow ones, with the branch coverage of domain/ (at least 95 %)
	$(BIN)/python scripts/run_real_tests.py $(OTHER_UNIT_TESTS) -n 3 $(ORDERED) -m fast $(PYTEST_ARGS)
	$(BIN)/pytest $(DOMAIN_TESTS) $(FAST) --cov=distributed_grid.domain --cov-branch \
		--cov-report=term-missing --cov-fail-under=95 $(PYTEST_ARGS)

# Most of these wait for something, so there are more at a time than cores; those that measure the machine run alone.
test-real: setup system-packages ## real processes, the real grid, several real hosts by SSH, a real Ray cluster, slow unit tests
	$(BIN)/python scripts/run_real_tests.py $(REAL_TESTS) $(SLOW_UNIT_TESTS) -m "not fast and not alone and not chaos" $(PARALLEL) $(PYTEST_ARGS)
	$(BIN)/python scripts/run_real_tests.py $(ALONE_TESTS) -p no:schemathesis -m "alone and not chaos" $(PYTEST_ARGS)

test-component: setup system-packages ## real processes of one package: attempts, memory servers, SSH servers
	$(BIN)/pytest tests/component $(PARALLEL) $(PYTEST_ARGS)

test-e2e: setup system-packages ## the real grid in temporary state directories
	$(BIN)/pytest tests/e2e $(wildcard tests/test_*.py) -m "not chaos" $(PARALLEL) $(PYTEST_ARGS)

test-lab: setup system-packages ## several real hosts on this machine, by SSH (docs/internals/lab.md)
	$(BIN)/pytest tests/lab/hosts -m "not chaos" $(PYTEST_ARGS)

test-ray: setup system-packages ## a real Ray cluster on three hosts of a lab (docs/guide/ray.md)
	$(BIN)/pytest tests/lab/ray -m "not chaos" $(PYTEST_ARGS)

# The tests that need one of these skip with a reason where it is missing (and fail when CI=1).
system-packages:
	@scripts/install_system_packages faketime:faketime ip:iproute2 ssh:openssh-client sshd:openssh-server cc:gcc,libc6-dev dockerd:docker.io slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge

chaos: setup ## break 1,000 simulated grids and check every invariant after every step (docs/internals/simulator.md); send 1,000,000 mutated frames to real processes (docs/internals/fuzzing.md); 500 fault schedules on a stand-in of every cloud (docs/internals/cloud-campaign.md); 40 moves of processes between real hosts with faults (docs/internals/lab.md)
	$(BIN)/python -m tests.simulation $(CHAOS_ARGS)
	$(BIN)/python -m tests.clouds $(CLOUD_ARGS)
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)
	$(BIN)/python -m tests.lab.move_campaign $(MOVE_ARGS)
	$(BIN)/pytest tests/lab/hosts -m chaos $(PYTEST_ARGS)
	$(BIN)/pytest tests/unit/scheduling tests/lab/ray -m chaos $(PYTEST_ARGS)
	$(BIN)/pytest tests/e2e/test_bench.py -m chaos $(PYTEST_ARGS)

bench: setup ## measure, and print the table with the ratios
	$(BIN)/python -m bench $(BENCH_ARGS)

worker-image: setup ## build the image of worker containers on this machine's Docker engine (docs/guide/docker-workers.md)
	$(BIN)/python scripts/build_worker_image.py $(IMAGE_ARGS)

demo: ## borrow a core of this machine, compute pi on it, look at the grid
	./grid run-shared --resource-type cpu --amount 1 python examples/pi.py
	./grid status

lock: setup ## compute the lock files anew (LOCK_ARGS=--upgrade takes newer versions)
	$(COMPILE) pyproject.toml --group build --group dev --output-file requirements-dev.lock
	$(COMPILE) pyproject.toml --group build --constraint requirements-dev.lock --output-file requirements.lock
	$(COMPILE) pyproject.toml --group build --extra ray --constraint requirements-dev.lock --output-file requirements-ray.lock

clean: ## remove caches and build output; .venv stays
	rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +
