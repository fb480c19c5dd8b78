# The engine of the cluster's tests: the enginecore's own code on an executor without a model, and so without torch. On the coordinator's
# image, which has most of what it imports; sources.py makes what it is built from.
ARG PYTHON_IMAGE
ARG COORDINATOR_IMAGE

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS oracle-build
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/build
COPY constraints.txt ./
ARG PIP_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --target /opt/oracle/packages huggingface-hub numpy xxhash

# hadolint ignore=DL3006
FROM ${COORDINATOR_IMAGE} AS oracle
LABEL org.opencontainers.image.title=penstock-oracle-engine \
      org.opencontainers.image.description="An engine with known tokens, for tests"
COPY --from=oracle-build /opt/oracle/packages /opt/oracle/packages
COPY demo-model /opt/penstock/demo-model
COPY code /opt/oracle/code
ENV PYTHONPATH=/opt/oracle/code:/opt/oracle/packages
EXPOSE 50052 9100
ENTRYPOINT ["tini", "--", "python", "-m", "tests.fakes.engines.oracle_service"]
