# Tasks of the project; `make help` lists them. They need Python 3.11 or later, make and a package index.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= examples/demo_model/penstock-tiny
DISTS := client common frontend enginecore coordinator local
PIP := $(BIN)/pip --disable-pip-version-check
# Each test computes on one thread, because several tests run at once.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Keep compiled Python files, because tests start many programs. Some Python images disable them.
unexport PYTHONDONTWRITEBYTECODE
# Hide gRPC's messages about connections that tests break on purpose.
export GRPC_VERBOSITY ?= ERROR
PYTEST := $(BIN)/python -m pytest
# Number of test processes. Tests of services wait about as long as they compute, so more of them can run.
JOBS ?= 2
JOBS_WAITING ?= 3
TESTS := tests/e2e tests/clients tests/integration tests/contract tests/unit
# Print the output of parallel targets when each has ended. make 3.81 cannot do this.
WHOLE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# Image builder: docker, podman, or buildah, which needs no daemon. REGISTRY is the prefix of image names, as image.registry of the chart.
IMAGE_BUILDER ?= docker
REGISTRY ?=
# The default tag names the commit and a hash of uncommitted changes, because nodes cache images by tag.
TAG ?=
image_tag = $(or $(TAG),$(eval TAG := $(shell $(PYTHON) charts/image_tag.py))$(TAG))
# File of chart values that name the images of the last build.
IMAGE_VALUES ?= build/image-values.yaml
# Suffix of the engine image's tag: cuda or cpu. TORCH_INDEX_URL selects the build of torch.
DEVICE ?= cuda
REVISION = $(shell git describe --always --abbrev=40 --exclude='*' --dirty)
# Build arguments of the Dockerfile that are set, here or in the environment.
IMAGE_ARGS = $(strip $(foreach name,PYTHON_IMAGE DEBIAN_MIRROR PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST TORCH_INDEX_URL \
	KERNEL_SHAPES KERNEL_CAPABILITIES HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy,$(if $($(name)),--build-arg $(name)="$($(name))")))
IMAGE_LABELS = --label org.opencontainers.image.version=$(image_tag) --label org.opencontainers.image.revision=$(REVISION) \
	$(if $(SOURCE),--label org.opencontainers.image.source=$(SOURCE))
# The command that must succeed before a release.
GATES ?= make test
# Folder for the reasons of skipped tests of one `make test`.
SKIPPED := build/skipped
BUF := node_modules/.bin/buf
# Descriptor set of the contracts of the last release.
RELEASED = $(shell cd protos && ls released/*.binpb | sort -V | tail -n 1)
# Marker files that exist after chart checks, a short soak or sanitizers have failed.
CHART_FAILED := build/chart.failed
SOAK_FAILED := build/soak-short.failed
SANITIZE_FAILED := build/sanitize.failed

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.ready ## Create the environment in .venv; runs again when dependencies or contracts change

# Install third-party packages at the versions of constraints.txt first, then our own distributions.
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
	@echo "setup: done; activate the environment with: source $(BIN)/activate"

.PHONY: proto
proto: setup ## Regenerate the protobuf stubs in the environment
	@$(PIP) install -q --no-deps --no-build-isolation --force-reinstall ./protos

.PHONY: serve
serve: setup ## Serve MODEL (default: the demo model) on this machine
	@$(BIN)/penstock serve $(MODEL)

.PHONY: demo
demo: setup ## Start two engines with the demo model, stream answers, stop
	@$(BIN)/python -m penstock_local demo $(MODEL)

.PHONY: test
test: setup ## Run lint, types and all tests except slow ones; list the skipped tests
	@rm -f $(SKIPPED)
	@SKIPPED_TESTS=$(CURDIR)/$(SKIPPED) $(MAKE) --no-print-directory test-all; status=$$?; \
		$(BIN)/python -m tests.skipped $(SKIPPED); exit $$status

.PHONY: test-all
test-all: test-checks test-quick

.PHONY: test-checks
test-checks: setup
	@$(MAKE) --no-print-directory -j 2 $(WHOLE) typecheck chart-lint docs lint

# One session collects and imports once. Tests that wait for processes run first, so that all test processes end together.
.PHONY: test-quick
test-quick: setup
	@QUICK_TESTS=1 CLIENT_LANGUAGES=python,node $(PYTEST) $(TESTS) -n $(JOBS_WAITING) --dist loadfile --no-loadscope-reorder -q

.PHONY: test-slow
test-slow: setup ## Run the slow tests
	@CLIENT_LANGUAGES=python,node $(PYTEST) $(TESTS) -m slow -n $(JOBS_WAITING) --dist loadfile --no-loadscope-reorder -q

.PHONY: retest
retest: lint typecheck docs ## Run lint, types and docs, and repeat the failed tests, chart checks, soak and sanitizers
	@test ! -e $(CHART_FAILED) || $(MAKE) chart-lint
	@test ! -e $(SOAK_FAILED) || $(MAKE) soak-short
	@test ! -e $(SANITIZE_FAILED) || $(MAKE) sanitize
	@files=$$($(BIN)/python -m tests.failed) || exit; test -z "$$files" || $(PYTEST) $$files --last-failed --last-failed-no-failures none -q

.PHONY: test-unit
test-unit: setup ## Run the unit tests
	@QUICK_TESTS=1 $(PYTEST) tests/unit -n $(JOBS) -q

.PHONY: test-contract
test-contract: setup ## Run the tests of contracts, imports and pages
	@QUICK_TESTS=1 $(PYTEST) tests/contract -n $(JOBS) -q

.PHONY: test-integration
test-integration: setup ## Run the integration tests
	@QUICK_TESTS=1 $(PYTEST) tests/integration -n $(JOBS_WAITING) -q

.PHONY: test-e2e
test-e2e: setup ## The whole system as separate processes
	@QUICK_TESTS=1 CLIENT_LANGUAGES=python,node $(PYTEST) tests/e2e tests/clients -n $(JOBS_WAITING) --dist loadfile --no-loadscope-reorder -q

.PHONY: matrix
matrix: setup ## Run every engine failure at every step; writes docs/reference/failure-matrix.md
	@PENSTOCK_MATRIX=full PENSTOCK_MATRIX_REPORT=docs/reference/failure-matrix.md $(PYTEST) tests/integration/test_failure_matrix.py -q; \
		status=$$?; cat docs/reference/failure-matrix.md; exit $$status

.PHONY: recurrent-matrix
recurrent-matrix: setup ## Run the tests of recurrent layers with every model and all parameters (two hours)
	@PENSTOCK_RECURRENT=full $(PYTEST) tests/unit/enginecore/states tests/integration/test_recurrent_*.py tests/e2e/test_recurrent_kills.py -n $(JOBS_WAITING) -q

.PHONY: worker-failures
worker-failures: setup ## Kill and stop workers and nodes at every point, idle and under 64 streams (40 minutes)
	@PENSTOCK_WORKER_FAILURES=full $(PYTEST) tests/integration/test_worker_failures.py tests/integration/test_nodes.py tests/e2e/test_worker_streams.py tests/e2e/test_node_streams.py -n 0 -q -s

.PHONY: kv-kills
kv-kills: setup ## Kill engines and frontends and cut the network at every point of a KV transfer (25 minutes)
	@PENSTOCK_KV_KILLS=full $(PYTEST) tests/integration/test_kv_kills.py tests/integration/test_kv_transfer_kills.py tests/e2e/test_kv_kills.py -n 0 -q -s

.PHONY: cluster-tools
cluster-tools: setup ## Build Kubernetes and its tools for the test cluster into build/cluster, from Go modules
	@$(BIN)/python -m tests.cluster.tools.build $(COMPONENTS)

.PHONY: cluster-test
cluster-test: setup ## Test the chart on a real Kubernetes, in two clusters at once; needs root and cluster-tools
	@$(BIN)/python -m tests.cluster $(if $(MINOR),--minor $(MINOR)) test $(or $(CLUSTER_TESTS),--clusters 2)

.PHONY: cluster
cluster: setup ## Start a test cluster until Ctrl-C
	@$(BIN)/python -m tests.cluster $(if $(MINOR),--minor $(MINOR)) up

.PHONY: lint
lint: setup proto-break ## Run ruff, check commit subjects, and run buf if npm exists
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python -m tests.commit_subject
	@if test -x $(BUF); then cd protos && ../$(BUF) lint && echo "buf lint passed"; fi

.PHONY: proto-break
proto-break: ## Compare the contracts with those of the last release, if npm exists
	@if command -v npm >/dev/null && { test -x $(BUF) || npm install --silent --no-audit --no-fund 2>/dev/null; }; \
	then cd protos && ../$(BUF) breaking --against $(RELEASED) && echo "buf breaking passed against $(RELEASED)"; \
	else echo "buf skipped: it comes from npm, which is not here; tests/contract checks the conventions"; fi

.PHONY: stubs
stubs: setup ## Build the contract packages (wheel, npm, Go, Maven, crate) into build/stubs
	@$(BIN)/python protos/stubs $(LANGUAGES)

.PHONY: clients-test
clients-test: setup ## Test the clients of every language whose tools are installed
	@$(PYTEST) tests/clients -n 0 -q

.PHONY: framework-clients
framework-clients: ## Install LangChain and LlamaIndex into build/frameworks for their tests
	@for name in langchain llama-index; do \
	  $(PYTHON) -m venv build/frameworks/$$name && build/frameworks/$$name/bin/pip install -q -r tests/clients/frameworks/$$name.txt || exit 1; \
	done

.PHONY: format
format: setup ## Format the code and fix lint findings
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: typecheck
typecheck: setup ## Run mypy in strict mode
	@$(BIN)/mypy

.PHONY: settings
settings: setup ## Regenerate the pages of settings, flags, fields, features and code, and the chart's schema and README
	@$(BIN)/python -m charts.settings
	@$(BIN)/python -m tests.pairs.page
	@$(BIN)/python -m tests.documents.field_tables
	@$(BIN)/python -m tests.documents.flags
	@$(BIN)/python -m tests.documents.code_map

.PHONY: release
release: setup ## Check, build, commit and tag release VERSION after GATES have passed (docs/releases.md)
	@test -n "$(VERSION)" || { echo "usage: make release VERSION=0.2.0" >&2; exit 1; }
	@$(BIN)/python -m charts.release $(VERSION) --gates '$(GATES)'

.PHONY: release-files
release-files: setup ## Build the wheels, the chart package and the contracts of the version into build/publish
	@$(BIN)/python -m charts.release.artifacts build/publish

# helm may be the one of the environment.
PUBLISH = PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTHON) -m charts.release.publish --registry '$(REGISTRY)' --builder '$(IMAGE_BUILDER)' --device '$(DEVICE)'

.PHONY: publish-files
publish-files: ## Attach build/publish to a release on GitHub, from the tagged commit
	@$(PUBLISH) files

.PHONY: publish-images
publish-images: ## Build the images of the version and push them to REGISTRY, from the tagged commit
	@$(PUBLISH) images

.PHONY: publish-chart
publish-chart: setup ## Package the chart and push it to REGISTRY, from the tagged commit
	@$(PUBLISH) chart

.PHONY: publish-dry-run
publish-dry-run: docs release-files ## Build everything that a release publishes but the images, and print the uploads
	@echo "would publish: build/docs, $$(find build/docs -type f | wc -l) files"
	@$(PUBLISH) --dry-run files images chart

.PHONY: docs
docs: setup ## Build the docs site into build/docs; warnings and broken links are errors
	@$(BIN)/python -m docs.site

.PHONY: dashboard
dashboard: setup ## Regenerate the chart's dashboard from its panels
	@$(BIN)/python -m charts.monitoring.dashboard

.PHONY: rules-test
rules-test: setup ## Test the chart's alerts with a real Prometheus; needs cluster-tools
	@$(PYTEST) tests/monitoring -q

.PHONY: chart-lint
chart-lint: setup ## Lint the chart, render every value set, validate the manifests, run the chart tests
	@mkdir -p $(dir $(CHART_FAILED)) && touch $(CHART_FAILED)
	@$(BIN)/python -m charts.lint
	@$(PYTEST) tests/chart -q && rm $(CHART_FAILED)

.PHONY: images
images: image-coordinator image-frontend image-enginecore ## Build the images with IMAGE_BUILDER, named REGISTRY/penstock/SERVICE:TAG

.PHONY: image-coordinator image-frontend image-enginecore
image-enginecore: SUFFIX := -$(DEVICE)
image-coordinator image-frontend image-enginecore: image-%:
	$(IMAGE_BUILDER) build --target $* --tag $(if $(REGISTRY),$(REGISTRY)/)penstock/$*:$(image_tag)$(SUFFIX) \
		$(IMAGE_ARGS) $(IMAGE_LABELS) $(IMAGE_FLAGS) .
	@$(MAKE) --no-print-directory image-values TAG=$(image_tag)

.PHONY: image-tag
image-tag: ## Print the image tag of the current files
	@echo $(image_tag)

.PHONY: image-values
image-values: ## Write IMAGE_VALUES: chart values with the tag and REGISTRY
	@mkdir -p $(dir $(IMAGE_VALUES))
	@printf 'image:\n  registry: "%s"\n  tag: "%s"\n' "$(REGISTRY)" "$(image_tag)" > $(IMAGE_VALUES)
	@echo "wrote $(IMAGE_VALUES): image.tag $(image_tag)"

.PHONY: cluster-images
cluster-images: setup ## Build the test cluster's images (IMAGES selects some) into build/cluster/images; needs buildah and root
	@$(BIN)/python -m tests.cluster.images.build $(IMAGES)

.PHONY: image-test
image-test: setup ## Check the contents of the images, and that they run read-only as an ordinary user
	@$(PYTEST) tests/images -q -rs

.PHONY: soak
soak: setup ## Send random requests with kills, KV transfer and offloading for 20 minutes
	@$(BIN)/python -m tests.soak --kv --minutes 20

.PHONY: soak-kv
soak-kv: setup ## Run the soak test with KV transfer and offloading for 10 minutes
	@$(BIN)/python -m tests.soak --kv --minutes 10 --out build/soak-kv

.PHONY: soak-media
soak-media: setup ## Run the soak test with images, video and killed media workers for 10 minutes
	@$(BIN)/python -m tests.soak --towers qwen2_vl --minutes 10 --out build/soak-media

.PHONY: soak-short
soak-short: setup ## Run the soak test for one minute and at least five accidents
	@mkdir -p $(dir $(SOAK_FAILED)) && touch $(SOAK_FAILED)
	@$(BIN)/python -m tests.soak --towers qwen2_vl --minutes 1 --pause 0.5 --accidents 5 --out build/soak-short && rm $(SOAK_FAILED)

.PHONY: soak-lora
soak-lora: setup ## Load, replace, unload and pin adapters under load for 5 minutes
	@$(BIN)/python -m tests.soak.lora --seconds 300 --json build/soak-lora.json

.PHONY: bench
bench: setup ## Measure the engine, the session, the public API and transformers
	@$(BIN)/python -m tests.benchmarks.run --model $(MODEL)

.PHONY: ring
ring: setup ## Send a million messages through the ring buffer between processes, and measure step overhead
	@$(BIN)/python -m tests.benchmarks.step_ring --messages 1000000
	@$(BIN)/python -m tests.benchmarks.step_ring

.PHONY: expert-matrix
expert-matrix: setup ## Compare every mixture of experts on 1 to 4 ranks with one rank (1 minute)
	@$(BIN)/python -m tests.expert_matrix

.PHONY: parallel-matrix
parallel-matrix: setup ## Compare every family on 2 to 4 workers with one worker (15 minutes)
	@$(BIN)/python -m tests.parallel_matrix

.PHONY: bench-routing
bench-routing: setup ## Measure hit rate, balance and cost of each routing policy
	@$(BIN)/python -m tests.benchmarks.routing $(ARGS)
	@$(BIN)/python -m tests.benchmarks.routing_engines
	@$(BIN)/python -m tests.benchmarks.lora_routing

.PHONY: check-gpu
check-gpu: setup ## Check results on a GPU, family by family; ARGS=--tiny for the CPU
	@$(BIN)/python tests/device/bare.py run --installed --checks $(ARGS)

.PHONY: bench-gpu
bench-gpu: setup ## Measure an engine against the limits of the GPU; ARGS=--tiny runs every phase on the CPU
	@$(BIN)/python tests/device/bare.py run --installed $(ARGS)

.PHONY: gpu-pack
gpu-pack: setup ## Collect wheels for a GPU machine without a package index; ARGS="--python 3.12"
	@$(BIN)/python tests/device/bare.py pack $(ARGS)

.PHONY: kernels-cache
kernels-cache: setup ## Compile GPU kernels ahead of time; needs no GPU; ARGS="--shapes llama-8b"
	@$(BIN)/python -m penstock_enginecore.kernel_cache --directory build/kernels --capabilities 90 $(ARGS)
	@$(BIN)/python -m penstock_enginecore.kernel_cache --directory build/kernels --capabilities 90 --check $(ARGS)

.PHONY: bench-coordinator
bench-coordinator: setup ## Measure the coordinator with 1000 engines and 100 frontends (3 minutes)
	@$(BIN)/python -m tests.benchmarks.coordinator $(ARGS)

.PHONY: kernels-report
kernels-report: setup ## Compile every tuned GPU kernel and print registers, shared memory and spills; needs no GPU
	@$(BIN)/python -m tests.compiled

.PHONY: fuzz
fuzz: setup ## Send 50 000 hostile requests, and check that other requests are undisturbed (20 minutes)
	@$(BIN)/python -m tests.fuzz.run --requests $(or $(REQUESTS),50000) --seed $(or $(SEED),7) --variant $(or $(VARIANT),all)

.PHONY: fuzz-connections
fuzz-connections: setup ## Open 20 000 hostile HTTP and gRPC connections (15 minutes)
	@$(BIN)/python -m tests.fuzz.connections --connections $(or $(CONNECTIONS),20000) --seed $(or $(SEED),7)

.PHONY: fuzz-ports
fuzz-ports: setup ## Open 1000 foreign connections to every internal port under 56 streams (20 minutes)
	@$(BIN)/python -m tests.fuzz.internal_ports --connections $(or $(CONNECTIONS),1000)

.PHONY: fuzz-media
fuzz-media: setup ## Send 10 000 requests with hostile media, hosts and killed decoders (7 minutes)
	@$(BIN)/python -m tests.fuzz.run --requests $(or $(REQUESTS),10000) --seed $(or $(SEED),7) --variant $(or $(VARIANT),media) --schema-examples 0 --rate 60 --quiet 8

.PHONY: fuzz-sounds
fuzz-sounds: setup ## Decode 3000 hostile audio files in media workers (10 seconds)
	@$(BIN)/python -m tests.fuzz.sounds $(or $(REQUESTS),3000) $(or $(SEED),7)

.PHONY: fuzz-tensors
fuzz-tensors: setup ## Send 20 000 wrong sequences of tensor chunks (3 minutes)
	@$(BIN)/python -m tests.fuzz.tensors $(or $(REQUESTS),20000) $(or $(SEED),7)

.PHONY: sanitize
sanitize: setup ## Run compiled code under ASan, UBSan and TSan (2 minutes)
	@mkdir -p $(dir $(SANITIZE_FAILED)) && touch $(SANITIZE_FAILED)
	@$(BIN)/python -m tests.sanitizers && rm $(SANITIZE_FAILED)

.PHONY: model-check
model-check: setup ## Explore every state of small data-parallel groups under faults (25 minutes)
	@$(BIN)/python -m tests.modelcheck $(ARGS)
	@$(BIN)/python -m tests.modelcheck.walk

.PHONY: group-kills
group-kills: setup ## Kill, stop and cut off ranks of a group KILLS times (20), and change its size
	@PENSTOCK_GROUP_KILLS=$${KILLS:-20} $(PYTEST) tests/e2e/test_data_parallel.py $(wildcard tests/e2e/test_group_*.py) -n 0 -q -s

.PHONY: rank-failures
rank-failures: setup ## Kill ranks and the coordinator at every named point, also during size changes (40 minutes)
	@PENSTOCK_RANK_FAILURES=full $(PYTEST) tests/e2e/test_rank_failures.py tests/e2e/test_size_failures.py -n 0 -q -s

.PHONY: clean
clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis node_modules
