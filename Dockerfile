# The images, a target for each service. `make images` builds them; by hand: docker build --target frontend -t penstock/frontend .
# What they share stands once: `build` has pip, `wheels` what all services import, `runtime` is what they run in. Then the services, the
# one with torch last: some builders go through every stage before the one that is asked for.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
# pip has an environment of its own, so that there is none in the services'.
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/build && python -m venv --without-pip /opt/penstock/venv
COPY constraints.txt ./
# Set them to install from package indexes of your own. Builders hand on HTTP_PROXY, HTTPS_PROXY and NO_PROXY without an ARG, and keep
# them out of the images.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
# It writes down what an environment holds: the bill of materials that each image has in /usr/share/penstock.
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt cyclonedx-bom

# Builders differ in whether a stage inherits the arguments of the one it is made from: each stage that uses pip names its own.
FROM build AS wheels
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY protos protos
COPY services/common services/common
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /wheels ./protos ./services/common

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS runtime
# In place of http://deb.debian.org: a mirror with debian and debian-security below it. Images keep the sources of their base.
ARG DEBIAN_MIRROR
# tini passes signals on: as process 1, Python would not heed a SIGTERM that comes before its handlers are set.
# The base's own pip goes: nothing is installed into a running image.
# hadolint ignore=DL3008
RUN if [ -n "$DEBIAN_MIRROR" ]; then sed -i.base "s|http://deb.debian.org|$DEBIAN_MIRROR|" /etc/apt/sources.list.d/debian.sources; fi \
    && apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && if [ -n "$DEBIAN_MIRROR" ]; then mv /etc/apt/sources.list.d/debian.sources.base /etc/apt/sources.list.d/debian.sources; fi \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
        /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip \
    && groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp penstock
ENV PATH=/opt/penstock/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.licenses=Apache-2.0
USER 10001:10001

FROM wheels AS coordinator-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY services/coordinator services/coordinator
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./services/coordinator \
    && pip --python /opt/penstock/venv/bin/python install --constraint constraints.txt /wheels/*.whl \
    && cyclonedx-py environment --output-reproducible --output-file /opt/penstock/sbom.json /opt/penstock/venv/bin/python

FROM runtime AS coordinator
LABEL org.opencontainers.image.title=penstock-coordinator \
      org.opencontainers.image.description="Penstock's coordinator: which engines there are, for the frontends"
COPY --from=coordinator-build /opt/penstock/sbom.json /usr/share/penstock/sbom.json
COPY --from=coordinator-build /opt/penstock/venv /opt/penstock/venv
EXPOSE 50050 9100
ENTRYPOINT ["tini", "--", "python", "-m", "penstock_coordinator"]

FROM wheels AS frontend-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY services/frontend services/frontend
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./services/frontend \
    && pip --python /opt/penstock/venv/bin/python install --constraint constraints.txt /wheels/*.whl \
    && cyclonedx-py environment --output-reproducible --output-file /opt/penstock/sbom.json /opt/penstock/venv/bin/python

FROM runtime AS frontend
LABEL org.opencontainers.image.title=penstock-frontend \
      org.opencontainers.image.description="Penstock's frontend: the public API over gRPC and HTTP"
COPY --from=frontend-build /opt/penstock/sbom.json /usr/share/penstock/sbom.json
COPY --from=frontend-build /opt/penstock/venv /opt/penstock/venv
COPY examples/demo_model/penstock-tiny /opt/penstock/demo-model
# The frontend runs no model. torch would make its image ten times as large, so a dependency that brings it fails the build.
RUN python -c "import importlib.util, sys; sys.exit('torch was installed' if importlib.util.find_spec('torch') else 0)"
EXPOSE 50051 8000
ENTRYPOINT ["tini", "--", "python", "-m", "penstock_frontend"]

FROM build AS torch
ARG DEBIAN_MIRROR
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
# The package index that torch comes from, which decides its build: each CUDA version has one, and so has the CPU build.
# Empty: the default index, whose torch for x86-64 brings CUDA along.
ARG TORCH_INDEX_URL=""
# For the CPU kernels; an image without them would serve on CPUs several times slower.
# hadolint ignore=DL3008
RUN if [ -n "$DEBIAN_MIRROR" ]; then sed -i.base "s|http://deb.debian.org|$DEBIAN_MIRROR|" /etc/apt/sources.list.d/debian.sources; fi \
    && apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PENSTOCK_REQUIRE_KERNELS=1
# First and alone, so that a change of our code does not install it again.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/penstock/venv/bin/python install --constraint constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch

FROM torch AS enginecore-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY --from=wheels /wheels /wheels
COPY services/enginecore services/enginecore
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./services/enginecore \
    && pip --python /opt/penstock/venv/bin/python install --constraint constraints.txt /wheels/*.whl \
    && cyclonedx-py environment --output-reproducible --output-file /opt/penstock/sbom.json /opt/penstock/venv/bin/python

FROM enginecore-build AS kernels
# Kernels for GPUs, which need not be here. Without them an engine compiles for minutes when it starts, and without what Triton launches
# by, which is compiled beside them, it cannot: there is no C compiler where it runs. Torch's CPU build has no Triton, and gets none.
# KERNEL_SHAPES: none if it is empty.
ARG KERNEL_SHAPES="llama-1b llama-8b qwen3-8b"
ARG KERNEL_CAPABILITIES="80 89 90 100"
# hadolint ignore=SC2086
RUN mkdir /opt/penstock/kernels \
    && if [ -n "$KERNEL_SHAPES" ] && /opt/penstock/venv/bin/python -c "import triton"; then \
        /opt/penstock/venv/bin/python -m penstock_enginecore.kernel_cache --directory /opt/penstock/kernels \
            --shapes $KERNEL_SHAPES --capabilities $KERNEL_CAPABILITIES; \
    fi

FROM runtime AS enginecore
LABEL org.opencontainers.image.title=penstock-enginecore \
      org.opencontainers.image.description="Penstock's engine: schedules and computes the requests of one model"
COPY --from=enginecore-build /opt/penstock/sbom.json /usr/share/penstock/sbom.json
COPY --from=enginecore-build /opt/penstock/venv /opt/penstock/venv
COPY --from=kernels /opt/penstock/kernels /opt/penstock/kernels
COPY examples/demo_model/penstock-tiny /opt/penstock/demo-model
ENV PENSTOCK_KERNELS__CACHE=/opt/penstock/kernels
# What the NVIDIA container runtime mounts from the driver. Which GPUs there are is the device plugin's to say.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50052 9100
ENTRYPOINT ["tini", "--", "python", "-m", "penstock_enginecore"]
