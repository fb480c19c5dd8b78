# Penstock: every task of the project. `make help` lists them. Works from Python 3.11+, make and a package index.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= examples/demo_model/penstock-tiny
DISTS := client common frontend enginecore coordinator local
PIP := $(BIN)/pip --disable-pip-version-check
# Tests compute on one thread each: several run at once.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Programs that start many times are compiled once, also where images of Python have this set.
unexport PYTHONDONTWRITEBYTECODE
# What gRPC's C core has to say of connections that tests break on purpose.
export GRPC_VERBOSITY ?= ERROR
PYTEST := $(BIN)/python -m pytest
# Processes that tests run in at once. Those of services wait for one another about as long as they compute.
JOBS ?= 2
JOBS_WAITING ?= 3
TESTS := tests/e2e tests/clients tests/integration tests/contract tests/unit
# What runs beside each other writes its output when it has ended. make 3.81 cannot.
WHOLE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# Images: docker, podman, or buildah, which needs no daemon; a registry in front of their names, as the chart's image.registry.
IMAGE_BUILDER ?= docker
REGISTRY ?=
# By default one of the commit, and of the contents of files that differ from it: nodes keep images by their tags.
TAG ?=
image_tag = $(or $(TAG),$(eval TAG := $(shell $(PYTHON) charts/image_tag.py))$(TAG))
# What tells the chart the names of the images that were built last.
IMAGE_VALUES ?= build/image-values.yaml
# What the engine's image is called behind its tag: cuda or cpu. It decides nothing: TORCH_INDEX_URL does.
DEVICE ?= cuda
REVISION = $(shell git describe --always --abbrev=40 --exclude='*' --dirty)
# Those of the Dockerfile that are set, here or in the environment.
IMAGE_ARGS = $(strip $(foreach name,PYTHON_IMAGE DEBIAN_MIRROR PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST TORCH_INDEX_URL \
	KERNEL_SHAPES KERNEL_CAPABILITIES HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy,$(if $($(name)),--build-arg $(name)="$($(name))")))
IMAGE_LABELS = --label org.opencontainers.image.version=$(image_tag) --label org.opencontainers.image.revision=$(REVISION) \
	$(if $(SOURCE),--label org.opencontainers.image.source=$(SOURCE))
# The command that must succeed before a release.
GATES ?= make test
# What the tests of one `make test` have skipped.
SKIPPED := build/skipped
BUF := node_modules/.bin/buf
# The contracts of the last release, as a descriptor set.
RELEASED = $(shell cd protos && ls released/*.binpb | sort -V | tail -n 1)
# Are there after a chart, a short soak, or sanitizers, that failed.
CHART_FAILED := build/chart.failed
SOAK_FAILED := build/soak-short.failed
SANITIZE_FAILED := build/sanitize.failed

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.ready ## Create the environment in .venv (once; again when dependencies or contracts change)

# Third-party packages first, at the versions of constraints.txt; then our own distributions on top of them.
$(VENV)/.deps: constraints.txt requirements-dev.txt $(wildcard services/*/pyproject.toml) protos/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "setup: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing packages at the pinned versions (a few minutes the first time)"
	@$(PIP) install -q -r requirements-dev.txt -c constraints.txt 2> >(grep -v "is ignored: it is neither" >&2)
	@touch $@

$(VENV)/.ready: $(VENV)/.deps $(shell find protos -name '*.proto') protos/hatch_build.py $(wildcard services/enginecore/csrc/*) services/enginecore/hatch_build.py \
		services/client/build_sync_client.py services/client/penstock_client/async_client.py
	@echo "setup: generating stubs and the client for threads, compiling kernels and installing penstock"
	@$(PIP) install -q --no-deps --no-build-isolation --force-reinstall ./protos $(foreach d,$(DISTS),-e services/$(d)) \
		2> >(grep -v "is ignored: it is neither" >&2)
	@touch $@

.PHONY: proto
proto: setup ## Regenerate the protobuf stubs in the environment
	@$(PIP) install -q --no-deps --no-build-isolation --force-reinstall ./protos

.PHONY: serve
serve: setup ## Serve MODEL (default: the demo model) on this machine
	@$(BIN)/penstock serve $(MODEL)

.PHONY: demo
demo: setup ## Start everything with the demo model, stream a few answers, shut down
	@$(BIN)/python -m penstock_local demo $(MODEL)

.PHONY: test
test: setup ## Lint, types and tests; at the end, what was skipped and how to get it
	@rm -f $(SKIPPED)
	@SKIPPED_TESTS=$(CURDIR)/$(SKIPPED) $(MAKE) --no-print-directory test-all; status=$$?; \
		$(BIN)/python -m tests.skipped $(SKIPPED); exit $$status

.PHONY: test-all
test-all: test-checks test-quick

.PHONY: test-checks
test-checks: setup
	@$(MAKE) --no-print-directory -j 2 $(WHOLE) typecheck chart-lint docs lint

# In one session, which collects and imports once. What waits for processes comes first, so that workers end at the same time.
.PHONY: test-quick
test-quick: setup
	@QUICK_TESTS=1 CLIENT_LANGUAGES=python,node $(PYTEST) $(TESTS) -n $(JOBS_WAITING) --dist loadfile --no-loadscope-reorder -q

.PHONY: test-slow
test-slow: setup ## The tests that `make test` leaves out because they take long
	@CLIENT_LANGUAGES=python,node $(PYTEST) $(TESTS) -m slow -n $(JOBS_WAITING) --dist loadfile --no-loadscope-reorder -q

.PHONY: retest
retest: lint typecheck docs ## Lint, types and docs site again, and what failed last of the tests, the chart, the soak and the sanitizers
	@test ! -e $(CHART_FAILED) || $(MAKE) chart-lint
	@test ! -e $(SOAK_FAILED) || $(MAKE) soak-short
	@test ! -e $(SANITIZE_FAILED) || $(MAKE) sanitize
	@files=$$($(BIN)/python -m tests.failed) || exit; test -z "$$files" || $(PYTEST) $$files --last-failed --last-failed-no-failures none -q

.PHONY: test-unit
test-unit: setup ## Unit tests
	@QUICK_TESTS=1 $(PYTEST) tests/unit -n $(JOBS) -q

.PHONY: test-contract
test-contract: setup ## The rules of the contracts and of the imports
	@QUICK_TESTS=1 $(PYTEST) tests/contract -n $(JOBS) -q

.PHONY: test-integration
test-integration: setup ## Services against each other and against transformers
	@QUICK_TESTS=1 $(PYTEST) tests/integration -n $(JOBS_WAITING) -q

.PHONY: test-e2e
test-e2e: setup ## The whole system as separate processes
	@QUICK_TESTS=1 CLIENT_LANGUAGES=python,node $(PYTEST) tests/e2e tests/clients -n $(JOBS_WAITING) --dist loadfile --no-loadscope-reorder -q

.PHONY: matrix
matrix: setup ## Every failure of an engine at every step, with every kind of stream; writes docs/reference/failure-matrix.md
	@PENSTOCK_MATRIX=full PENSTOCK_MATRIX_REPORT=docs/reference/failure-matrix.md $(PYTEST) tests/integration/test_failure_matrix.py -q; \
		status=$$?; cat docs/reference/failure-matrix.md; exit $$status

.PHONY: worker-failures
worker-failures: setup ## Workers and nodes killed and stopped at every point, alone and under 64 streams on two engines (40 minutes)
	@PENSTOCK_WORKER_FAILURES=full $(PYTEST) tests/integration/test_worker_failures.py tests/integration/test_nodes.py tests/e2e/test_worker_streams.py tests/e2e/test_node_streams.py -n 0 -q -s

.PHONY: kv-kills
kv-kills: setup ## Engines, frontends and the network killed, stopped and cut off at every point of a transfer (25 minutes)
	@PENSTOCK_KV_KILLS=full $(PYTEST) tests/integration/test_kv_kills.py tests/integration/test_kv_transfer_kills.py tests/e2e/test_kv_kills.py -n 0 -q -s

.PHONY: cluster-tools
cluster-tools: setup ## Build Kubernetes and what the test cluster has beside it, from Go modules, into build/cluster
	@$(BIN)/python -m tests.cluster.tools.build $(COMPONENTS)

.PHONY: cluster-test
cluster-test: setup ## The chart on a real Kubernetes, files of tests in two clusters at once; needs root and cluster-tools
	@$(BIN)/python -m tests.cluster $(if $(MINOR),--minor $(MINOR)) test $(or $(CLUSTER_TESTS),--clusters 2)

.PHONY: cluster
cluster: setup ## A test cluster until Ctrl-C, for a look around
	@$(BIN)/python -m tests.cluster $(if $(MINOR),--minor $(MINOR)) up

.PHONY: lint
lint: setup proto-break ## ruff, commit subjects, and buf where npm is there
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python -m tests.commit_subject
	@if test -x $(BUF); then cd protos && ../$(BUF) lint && echo "buf lint passed"; fi

.PHONY: proto-break
proto-break: ## Hold the contracts against those of the last release, where npm is there
	@if command -v npm >/dev/null && { test -x $(BUF) || npm install --silent --no-audit --no-fund 2>/dev/null; }; \
	then cd protos && ../$(BUF) breaking --against $(RELEASED) && echo "buf breaking passed against $(RELEASED)"; \
	else echo "buf skipped: it comes from npm, which is not here; tests/contract checks the conventions"; fi

.PHONY: stubs
stubs: setup ## Build the packages of the contracts: wheel, npm package, Go module, Maven jar, crate, into build/stubs
	@$(BIN)/python protos/stubs $(LANGUAGES)

.PHONY: clients-test
clients-test: setup ## The clients of every language that there are tools for, built from the packages, against one suite
	@$(PYTEST) tests/clients -n 0 -q

.PHONY: framework-clients
framework-clients: ## Environments of their own with LangChain and LlamaIndex, into build/frameworks, for tests/clients/test_frameworks.py
	@for name in langchain llama-index; do \
	  $(PYTHON) -m venv build/frameworks/$$name && build/frameworks/$$name/bin/pip install -q -r tests/clients/frameworks/$$name.txt || exit 1; \
	done

.PHONY: format
format: setup ## Format and fix what ruff can fix
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: typecheck
typecheck: setup ## mypy strict
	@$(BIN)/mypy

.PHONY: settings
settings: setup ## Write docs/reference/settings.md, docs/reference/feature-pairs.md and the chart's schema and README anew, after a change of a setting
	@$(BIN)/python -m charts.settings
	@$(BIN)/python -m tests.pairs.page
	@$(BIN)/python -m tests.documents.field_tables
	@$(BIN)/python -m tests.documents.flags
	@$(BIN)/python -m tests.documents.code_map

.PHONY: release
release: setup ## Check, build, commit and tag release VERSION; GATES must pass first (docs/releases.md)
	@test -n "$(VERSION)" || { echo "usage: make release VERSION=0.2.0" >&2; exit 1; }
	@$(BIN)/python -m charts.release $(VERSION) --gates '$(GATES)'

.PHONY: docs
docs: setup ## Build the docs site into build/docs; warnings and broken links are errors. DOCS_SOURCE_URL: address of the files in a web view
	@$(BIN)/python -m docs.site

.PHONY: dashboard
dashboard: setup ## Write the chart's dashboard anew, after a change of its panels
	@$(BIN)/python -m charts.monitoring.dashboard

.PHONY: rules-test
rules-test: setup ## The chart's alerts on series, and with faults that are made, by a real Prometheus (make cluster-tools)
	@$(PYTEST) tests/monitoring -q

.PHONY: chart-lint
chart-lint: setup ## helm lint, render every value set, validate the manifests, chart tests
	@mkdir -p $(dir $(CHART_FAILED)) && touch $(CHART_FAILED)
	@$(BIN)/python -m charts.lint
	@$(PYTEST) tests/chart -q && rm $(CHART_FAILED)

.PHONY: images
images: image-coordinator image-frontend image-enginecore ## Build the images with IMAGE_BUILDER, as REGISTRY/penstock/SERVICE:TAG

.PHONY: image-coordinator image-frontend image-enginecore
image-enginecore: SUFFIX := -$(DEVICE)
image-coordinator image-frontend image-enginecore: image-%:
	$(IMAGE_BUILDER) build --target $* --tag $(if $(REGISTRY),$(REGISTRY)/)penstock/$*:$(image_tag)$(SUFFIX) \
		$(IMAGE_ARGS) $(IMAGE_LABELS) $(IMAGE_FLAGS) .
	@$(MAKE) --no-print-directory image-values TAG=$(image_tag)

.PHONY: image-tag
image-tag: ## Print the tag that images of the files as they are now get
	@echo $(image_tag)

.PHONY: image-values
image-values: ## Write IMAGE_VALUES, values of the chart with the tag and the REGISTRY; after each build of images
	@mkdir -p $(dir $(IMAGE_VALUES))
	@printf 'image:\n  registry: "%s"\n  tag: "%s"\n' "$(REGISTRY)" "$(image_tag)" > $(IMAGE_VALUES)
	@echo "wrote $(IMAGE_VALUES): image.tag $(image_tag)"

.PHONY: cluster-images
cluster-images: setup ## Build the images of the test cluster (IMAGES chooses some) into build/cluster/images, with buildah as root
	@$(BIN)/python -m tests.cluster.images.build $(IMAGES)

.PHONY: image-test
image-test: setup ## What is in the images of the test cluster, and that they run read-only as an ordinary user
	@$(PYTEST) tests/images -q -rs

.PHONY: soak
soak: setup ## Random requests, cancels and kills for 20 minutes, with keys and values that move between engines, memory and disks
	@$(BIN)/python -m tests.soak --kv --minutes 20

.PHONY: soak-kv
soak-kv: setup ## The same for ten minutes
	@$(BIN)/python -m tests.soak --kv --minutes 10 --out build/soak-kv

.PHONY: soak-media
soak-media: setup ## The same for ten minutes without, with images and video, small caches, and media workers that are killed
	@$(BIN)/python -m tests.soak --towers qwen2_vl --minutes 10 --out build/soak-media

.PHONY: soak-short
soak-short: setup ## The same for a minute and at least five accidents, one right after the other
	@mkdir -p $(dir $(SOAK_FAILED)) && touch $(SOAK_FAILED)
	@$(BIN)/python -m tests.soak --towers qwen2_vl --minutes 1 --pause 0.5 --accidents 5 --out build/soak-short && rm $(SOAK_FAILED)

.PHONY: soak-lora
soak-lora: setup ## Adapters that are loaded, replaced, unloaded and pinned under load for five minutes
	@$(BIN)/python -m tests.soak.lora --seconds 300 --json build/soak-lora.json

.PHONY: bench
bench: setup ## Measure the engine, the session, the public API and transformers beside them
	@$(BIN)/python -m tests.benchmarks.run --model $(MODEL)

.PHONY: ring
ring: setup ## A million messages over the ring between processes; then what a step costs on its way to the workers
	@$(BIN)/python -m tests.benchmarks.step_ring --messages 1000000
	@$(BIN)/python -m tests.benchmarks.step_ring

.PHONY: expert-matrix
expert-matrix: setup ## Every mixture of experts over 1 to 4 ranks: its tokens and logits, or why it is refused (a minute)
	@$(BIN)/python -m tests.expert_matrix

.PHONY: parallel-matrix
parallel-matrix: setup ## Every family over 2 to 4 workers, by tensor and pipeline: its tokens, or why it is refused (15 minutes)
	@$(BIN)/python -m tests.parallel_matrix

.PHONY: bench-routing
bench-routing: setup ## Cached prompts, evenness and time of the router's choices, by policy, over simulated and real engines
	@$(BIN)/python -m tests.benchmarks.routing $(ARGS)
	@$(BIN)/python -m tests.benchmarks.routing_engines
	@$(BIN)/python -m tests.benchmarks.lora_routing

.PHONY: check-gpu
check-gpu: setup ## Check what engines compute on a GPU, family by family; ARGS=--tiny for the CPU
	@$(BIN)/python tests/device/bare.py run --installed --checks $(ARGS)

.PHONY: bench-gpu
bench-gpu: setup ## Measure how near an engine comes to what the GPU can do; ARGS=--tiny for every phase on the CPU
	@$(BIN)/python tests/device/bare.py run --installed $(ARGS)

.PHONY: gpu-pack
gpu-pack: setup ## Collect wheels for measuring on a GPU machine without a package index; ARGS="--python 3.12"
	@$(BIN)/python tests/device/bare.py pack $(ARGS)

.PHONY: kernels-cache
kernels-cache: setup ## Compile kernels for a GPU that need not be here, and see that another process finds all; ARGS="--shapes llama-8b"
	@$(BIN)/python -m penstock_enginecore.kernel_cache --directory build/kernels --capabilities 90 $(ARGS)
	@$(BIN)/python -m penstock_enginecore.kernel_cache --directory build/kernels --capabilities 90 --check $(ARGS)

.PHONY: bench-coordinator
bench-coordinator: setup ## The coordinator with 1000 engines and 100 frontends, simulated and as real streams (3 minutes)
	@$(BIN)/python -m tests.benchmarks.coordinator $(ARGS)

.PHONY: kernels-report
kernels-report: setup ## Compile every tuned kernel for an H200, and print what it uses; needs no GPU
	@$(BIN)/python -m tests.compiled

.PHONY: fuzz
fuzz: setup ## 50 000 hostile requests at real systems, beside neighbours that must not notice (20 minutes)
	@$(BIN)/python -m tests.fuzz.run --requests $(or $(REQUESTS),50000) --seed $(or $(SEED),7) --variant $(or $(VARIANT),all)

.PHONY: fuzz-connections
fuzz-connections: setup ## 20 000 hostile connections over HTTP and gRPC, beside neighbours that must not notice (15 minutes)
	@$(BIN)/python -m tests.fuzz.connections --connections $(or $(CONNECTIONS),20000) --seed $(or $(SEED),7)

.PHONY: fuzz-ports
fuzz-ports: setup ## 1000 foreign connections to every internal port, beside 56 streams, and while systems start (20 minutes)
	@$(BIN)/python -m tests.fuzz.internal_ports --connections $(or $(CONNECTIONS),1000)

.PHONY: fuzz-media
fuzz-media: setup ## 10 000 requests with hostile media, their hosts and killed decoders, beside neighbours that must not notice (7 minutes)
	@$(BIN)/python -m tests.fuzz.run --requests $(or $(REQUESTS),10000) --seed $(or $(SEED),7) --variant $(or $(VARIANT),media) --schema-examples 0 --rate 60 --quiet 8

.PHONY: fuzz-tensors
fuzz-tensors: setup ## 20 000 sequences of tensors that do not come as they should, in chunks and shared memory, beside a neighbour (3 minutes)
	@$(BIN)/python -m tests.fuzz.tensors $(or $(REQUESTS),20000) $(or $(SEED),7)

.PHONY: sanitize
sanitize: setup ## What is compiled, under ASan, UBSan and TSan, each shown to find what is broken on purpose (2 minutes)
	@mkdir -p $(dir $(SANITIZE_FAILED)) && touch $(SANITIZE_FAILED)
	@$(BIN)/python -m tests.sanitizers && rm $(SANITIZE_FAILED)

.PHONY: model-check
model-check: setup ## Every state of small data-parallel groups under faults: millions, two networks at a time (25 minutes)
	@$(BIN)/python -m tests.modelcheck $(ARGS)
	@$(BIN)/python -m tests.modelcheck.walk

.PHONY: group-kills
group-kills: setup ## Kill ranks of a data-parallel group KILLS times (20), whenever; stop them, cut them off, change their number
	@PENSTOCK_GROUP_KILLS=$${KILLS:-20} $(PYTEST) tests/e2e/test_data_parallel.py $(wildcard tests/e2e/test_group_*.py) -n 0 -q -s

.PHONY: rank-failures
rank-failures: setup ## Ranks and coordinator of a data-parallel group killed at every named point, also while its size changes (40 minutes)
	@PENSTOCK_RANK_FAILURES=full $(PYTEST) tests/e2e/test_rank_failures.py tests/e2e/test_size_failures.py -n 0 -q -s

.PHONY: clean
clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis node_modules
