# The engine's environment without CUDA's libraries, from the stage of the Dockerfile that has made it.
ARG BUILT_IMAGE

# hadolint ignore=DL3006
FROM ${BUILT_IMAGE}
COPY without_cuda.py ./
RUN python without_cuda.py /opt/penstock/venv
