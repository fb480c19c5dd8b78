# The images, a target for each service. Build them from here: docker build --target frontend -t penstock/frontend .
# What they share stands once: `build` makes an environment, `wheels` what all services import, `runtime` is what they run in.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/penstock/venv
COPY constraints.txt ./

# Builders differ in whether a stage inherits the arguments of the one it is made from: each stage that uses pip names its own.
FROM build AS wheels
# Set it to install from a package index of your own.
ARG PIP_INDEX_URL
COPY protos protos
COPY services/common services/common
RUN pip wheel --no-deps --wheel-dir /wheels ./protos ./services/common

FROM build AS coordinator-build
ARG PIP_INDEX_URL
COPY --from=wheels /wheels /wheels
COPY services/coordinator services/coordinator
RUN pip wheel --no-deps --wheel-dir /wheels ./services/coordinator \
    && /opt/penstock/venv/bin/pip install --constraint constraints.txt /wheels/*.whl

FROM build AS frontend-build
ARG PIP_INDEX_URL
COPY --from=wheels /wheels /wheels
COPY services/frontend services/frontend
RUN pip wheel --no-deps --wheel-dir /wheels ./services/frontend \
    && /opt/penstock/venv/bin/pip install --constraint constraints.txt /wheels/*.whl

FROM build AS enginecore-build
ARG PIP_INDEX_URL
# The package index that torch comes from, which decides its build: each CUDA version has one, and so has the CPU build.
# Empty: the default index, whose torch for x86-64 brings CUDA along.
ARG TORCH_INDEX_URL=""
# For the CPU kernels; an image without them would serve on CPUs several times slower.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PENSTOCK_REQUIRE_KERNELS=1
# First and alone, so that a change of our code does not install it again.
RUN /opt/penstock/venv/bin/pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY --from=wheels /wheels /wheels
COPY services/enginecore services/enginecore
RUN pip wheel --no-deps --wheel-dir /wheels ./services/enginecore \
    && /opt/penstock/venv/bin/pip install --constraint constraints.txt /wheels/*.whl

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS runtime
# tini passes signals on: as process 1, Python would not heed a SIGTERM that comes before its handlers are set.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp penstock
ENV PATH=/opt/penstock/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001

FROM runtime AS coordinator
COPY --from=coordinator-build /opt/penstock/venv /opt/penstock/venv
EXPOSE 50050 9100
ENTRYPOINT ["tini", "--", "python", "-m", "penstock_coordinator"]

FROM runtime AS frontend
COPY --from=frontend-build /opt/penstock/venv /opt/penstock/venv
COPY examples/demo_model/penstock-tiny /opt/penstock/demo-model
# The frontend runs no model. torch would make its image ten times as large, so a dependency that brings it fails the build.
RUN python -c "import importlib.util, sys; sys.exit('torch was installed' if importlib.util.find_spec('torch') else 0)"
EXPOSE 50051 8000
ENTRYPOINT ["tini", "--", "python", "-m", "penstock_frontend"]

FROM runtime AS enginecore
COPY --from=enginecore-build /opt/penstock/venv /opt/penstock/venv
COPY examples/demo_model/penstock-tiny /opt/penstock/demo-model
# What the NVIDIA container runtime mounts from the driver. Which GPUs there are is the device plugin's to say.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50052 9100
ENTRYPOINT ["tini", "--", "python", "-m", "penstock_enginecore"]
